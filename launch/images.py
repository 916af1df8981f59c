"""The --image flag of a script, and reading the files that it names."""

from collections.abc import Sequence

from absl import flags

from dsv41.config import DSV41Error, ModelConfig
from dsv41.images import PreparedImage, read_image


class ImageFlags:
    """--image of a script."""

    def __init__(self, values: flags.FlagValues, use: str):
        """Defines the flag in `values`; `use` ends its help."""
        self._values = values
        flags.DEFINE_multi_string("image", [], f"An image file; may be given several times. {use}", flag_values=values)

    @property
    def given(self) -> bool:
        return bool(self._values.image)

    def read(self, config: ModelConfig) -> list[PreparedImage]:
        """The images in the order of the flags.

        Raises:
          DSV41Error: the model has no vision, or a file cannot be used.
        """
        if self.given and config.vision_config is None:
            raise DSV41Error("--image: the config has no vision_config")
        return [read_image(path, config.vision_config) for path in self._values.image]


def image_bytes(images: Sequence[PreparedImage]) -> bytes:
    """What tells these images from others."""
    return ",".join(image.content_hash for image in images).encode()
