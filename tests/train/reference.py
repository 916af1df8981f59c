"""The rules of training.md section 3 in float64 NumPy, one block and one step at a time."""

import numpy as np

MOMENTUM, RMS, DECAY = 0.95, 0.18, 0.1


def newton_schulz(x: np.ndarray) -> np.ndarray:
    x = x / np.linalg.norm(x)
    for step in range(10):
        a, b, c = (3.4445, -4.7750, 2.0315) if step < 8 else (2.0, -1.5, 0.5)
        square = x @ x.T
        x = a * x + b * square @ x + c * square @ square @ x
    return x


def muon_update(gradients: list[np.ndarray], blocks: int) -> np.ndarray:
    """The update of the last of these gradients [..., rows, cols], before the learning rate."""
    momentum = np.zeros(gradients[0].shape)
    for g in gradients:
        momentum = MOMENTUM * momentum + g
    ahead = MOMENTUM * momentum + gradients[-1]
    rows, cols = ahead.shape[-2] // blocks, ahead.shape[-1]
    parts = [newton_schulz(block) for block in ahead.reshape(-1, rows, cols)]
    return (np.stack(parts) * np.sqrt(max(rows, cols)) * RMS).reshape(ahead.shape)


def sinkhorn_direct(g: np.ndarray, steps: int = 11, threshold: float = 1e-3, eps: float = 1e-20) -> np.ndarray:
    """Delta of Algorithm 1, the matrix rewritten at every step."""
    norms = np.linalg.norm(g, axis=1)
    u = np.where((norms > threshold * norms.mean())[:, None], g, 0.0)
    for k in range(1, steps + 1):
        u = u / (np.linalg.norm(u, axis=k % 2, keepdims=True) + eps)
    return np.sqrt(g.shape[1]) * u


def sinkhorn_update(gradients: list[np.ndarray]) -> np.ndarray:
    beta, mean = 0.95, np.zeros(gradients[0].shape)
    for g in gradients:
        mean = beta * mean + (1 - beta) * g
    return RMS * sinkhorn_direct(beta * mean + (1 - beta) * gradients[-1])


def adam_update(gradients: list[np.ndarray]) -> np.ndarray:
    b1, b2, eps = 0.9, 0.95, 1e-20
    m = v = np.zeros(gradients[0].shape)
    for g in gradients:
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
    t = len(gradients)
    return m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps)
