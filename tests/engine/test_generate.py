"""generate: what stops a request, what a draw depends on, what is refused, and how little is compiled."""

import dataclasses

import jax
import numpy as np
import pytest

from dsv41.config import DSV41Error
from dsv41.engine import GenerationResult, check_prompts, generate
from dsv41.models import Model
from dsv41.ops.sampling import SamplingParams
from tests.golden import expected
from tests.models_for_tests import small_model

CHUNK = 8
# Four rows, so that every test runs the same two programs.
PROMPTS = [[0], [0, 5, 9, 100, 101, 102, 33], [0, *range(40, 47)], [0, *range(200, 232)]]
WARM = SamplingParams(temperature=1.0, top_p=0.95, top_k=40, seed=7)


def run(prompts=PROMPTS, **options) -> list[GenerationResult]:
    options = {"max_new_tokens": 6, "stop_ids": (), "prefill_chunk": CHUNK} | options
    return generate(small_model(), prompts, **options)


def ids(results: list[GenerationResult]) -> list[tuple[int, ...]]:
    return [r.token_ids for r in results]


def test_greedy_follows_the_argmax():
    """Each token is the argmax of a forward over all tokens before it."""
    prompt = expected("tiny_text")["input_ids"][:, :53]
    (first, second, *_) = run([*prompt.tolist(), [0], [0]], max_new_tokens=4)
    rows = np.stack([np.concatenate([p, r.token_ids[:-1]]) for p, r in zip(prompt, (first, second), strict=True)])
    model = small_model()  # the step is one of test_chunks
    logits, _, _ = model.forward(model.make_batch(rows), model.init_cache(2, 512, draft_tokens=5), logits="all")
    best = np.asarray(logits)[:2, 52:56].argmax(-1)
    np.testing.assert_array_equal(best, [first.token_ids, second.token_ids])


def test_results_add_up():
    seen, prefill = [], []
    results = run(on_token=lambda i, t: seen.append((i, t)), on_prefill=lambda *x: prefill.append(x))
    assert [r.finish_reason for r in results] == ["length"] * 4
    assert [r.prompt_tokens for r in results] == [1, 7, 8, 33]
    for i, r in enumerate(results):
        assert tuple(t for row, t in seen if row == i) == r.token_ids == r.text_ids
        assert len(r.token_ids) == 6
        assert r.timings.prefill_s > 0 and r.timings.decode_s > 0 and r.timings.compile_s > 0
        assert r.timings.decode_tokens_per_s == pytest.approx(5 / r.timings.decode_s)
    assert prefill[0] == (24, 49) and prefill[-1] == (49, 49) and len(prefill) == 5  # 33 tokens in chunks of 8
    # The first request is done before the longest prompt is in.
    assert [i for i, _ in seen].index(3) > 4


def test_measured_cache_bytes():
    sizes = small_model().init_cache(1, 256)
    arrays = [*sizes.main, *sizes.index]
    result = run()[0]
    assert result.kv_bytes_per_token == sum(a.nbytes for a in arrays) / 256
    assert result.window_bytes == sum(a.nbytes for a in sizes.window)


def test_sampling_repeats_and_depends_on_the_seed():
    one, two = run(sampling=WARM), run(sampling=WARM)
    other = run(sampling=dataclasses.replace(WARM, seed=8))
    assert ids(one) == ids(two)
    assert all(a != b for a, b in zip(ids(one), ids(other), strict=True))


@pytest.mark.slow
def test_a_draw_does_not_depend_on_the_other_rows():
    together = run(sampling=WARM)
    mixed = run(
        [PROMPTS[3][:5], PROMPTS[1], PROMPTS[0], PROMPTS[3]],
        sampling=[SamplingParams(seed=99), WARM, SamplingParams(temperature=0), WARM],
    )
    assert ids(mixed)[1] == ids(together)[1] and ids(mixed)[3] == ids(together)[3]
    assert ids(run(PROMPTS[1:2], sampling=WARM)) == ids(together)[1:2]


def test_sampling_of_each_request():
    greedy, warm = run(), run(sampling=WARM)
    mixed = run(sampling=[SamplingParams(temperature=0), WARM, SamplingParams(temperature=0), WARM])
    assert ids(mixed) == [ids(greedy)[0], ids(warm)[1], ids(greedy)[2], ids(warm)[3]]


def test_stop_ids_end_a_request():
    free = run()
    stop = free[3].token_ids[2]
    stopped = run(stop_ids=[stop, free[1].token_ids[0]])
    assert stopped[3].finish_reason == "stop"
    assert stopped[3].token_ids == free[3].token_ids[: free[3].token_ids.index(stop) + 1]
    assert stopped[3].text_ids == stopped[3].token_ids[:-1]
    assert stopped[1].token_ids == free[1].token_ids[:1] and stopped[1].text_ids == ()
    assert stopped[1].timings.decode_tokens_per_s is None
    # Rows that go on are not disturbed by those that have ended.
    for a, b in ((0, 0), (2, 2)):
        length = len(stopped[a].token_ids)
        assert stopped[a].token_ids == free[b].token_ids[:length]


def test_eos_is_the_default_stop_id():
    model = small_model()
    best, eos = run()[2].token_ids[0], model.config.eos_token_id
    head = model.params["head"]["weight"]
    swapped = {**model.params, "head": {"weight": head.at[np.array([best, eos])].set(head[np.array([eos, best])])}}
    results = generate(dataclasses.replace(model, params=swapped), PROMPTS, max_new_tokens=6, prefill_chunk=CHUNK)
    assert results[2].token_ids == (eos,) and results[2].finish_reason == "stop"


def test_chunks_do_not_change_the_draws():
    assert ids(run(prefill_chunk=5)) == ids(run())  # the same programs: 5 tokens are padded to 8


def test_every_position_may_be_used():
    config = small_model().config
    limit = config.text_config.max_position_embeddings
    assert len(check_prompts(config, [[1, 2, 3]], limit - 3)[0]) == 3
    with pytest.raises(DSV41Error, match=f"prompt 1: 3 tokens and {limit - 2} new ones exceed max_.*={limit}"):
        check_prompts(config, [[1], [1, 2, 3]], limit - 2)


@pytest.mark.parametrize(
    "prompts, options, message",
    [
        ([], {}, "no prompts"),
        ([[1], []], {}, "prompt 1: empty"),
        ([[1], [3, 512]], {}, r"prompt 1: token 1 is 512, expected an id in \[0, 512\)"),
        ([[-1]], {}, "prompt 0: token 0 is -1"),
        ([[1.5]], {}, "prompt 0: expected a list of token ids"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens: expected 1 or more, got 0"),
        ([[1]], {"prefill_chunk": 0}, "prefill_chunk: expected 1 or more, got 0"),
        ([[1]], {"stop_ids": [600]}, "stop_ids: token 0 is 600"),
        ([[1], [2]], {"sampling": [WARM]}, "sampling: expected parameters for 2 prompts, got 1"),
    ],
)
def test_bad_input_is_refused_before_any_work(monkeypatch, prompts, options, message):
    monkeypatch.setattr(Model, "init_cache", lambda *_, **__: pytest.fail("work was begun"))
    with pytest.raises(DSV41Error, match=message):
        run(prompts, **options)


def test_logits_that_are_not_numbers_end_the_run():
    model = small_model()
    broken = dict(model.params) | {"norm": jax.tree.map(lambda x: x * np.nan, model.params["norm"])}
    with pytest.raises(DSV41Error, match="prompt 0, new token 0: the model's logits hold NaN or infinity"):
        generate(dataclasses.replace(model, params=broken), PROMPTS, max_new_tokens=2, prefill_chunk=CHUNK)


def test_growing_sequences_compile_nothing(compilations):
    """Runs of other lengths, past several powers of two, meet only programs that exist."""
    run()
    jax.block_until_ready(jax.jit(lambda x: x + 1)(1))
    assert compilations  # the listener works
    compilations.clear()
    run([[0], [0] * 20, [0] * 3, [0] * 41], max_new_tokens=30, sampling=WARM)
    assert compilations == []
