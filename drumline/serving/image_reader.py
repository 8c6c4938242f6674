"""Prompts with images, for models that take them beside tokens.

images = ImageReader(processor)
prompt = images.read("<image> What is this?", ["data:image/png;base64,iVBORw0..."])
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

from PIL import Image, ImageOps

from drumline.serving import protocol
from drumline.serving.one_by_one import inputs_to_text
from drumline.serving.scheduler import Prompt

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 32 << 20  # of one image, whose file may be a thousandth of them
MAX_INPUTS_NBYTES = 128 << 20  # of what the model takes for all images of a request


class ImageReader:
    """Makes prompts of rendered chats and their images. Raises ApiError for what it refuses.

    processor: transformers', of the model.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def begins(self, text: str) -> bool:
        """True if a chat brings the token that begins a text, which is added to others."""
        begin = self._processor.tokenizer.bos_token
        return begin is not None and text.startswith(begin)

    def read(self, text: str, urls: Sequence[str]) -> Prompt:
        """The prompt of a chat. urls: of its images, in the order of their places in the text."""
        images = [_image(url) for url in urls]
        options = {"add_special_tokens": False} if self.begins(text) else {}
        try:
            made = self._processor(text=text, images=[images], return_tensors="pt", **options)
        except Exception as error:  # each kind of model has its own for images that it rejects
            raise protocol.invalid_request(f"messages: {error}", "messages") from error
        inputs = {name: value for name, value in made.items() if name != "attention_mask"}
        tokens = inputs.pop("input_ids")[0].tolist()
        if (nbytes := sum(value.nbytes for value in inputs.values())) > MAX_INPUTS_NBYTES:
            text = (
                f"messages: the images come to {nbytes} bytes for the model, more than the "
                f"{MAX_INPUTS_NBYTES} that this server holds for a request; send fewer, or smaller."
            )
            raise protocol.invalid_request(text, "messages")
        return Prompt(tokens, inputs_to_text(inputs))


def _image(url: str) -> Any:
    """The upright RGB image of a data URL."""
    kind, _, data = url.partition(";base64,")
    if not kind.startswith("data:image/"):
        raise protocol.invalid_request(
            f"messages: the image at {url!r:.60} is not fetched by this server; send its file as "
            "data:image/png;base64,...",
            "messages",
        )
    try:
        with Image.open(io.BytesIO(base64.b64decode(data, validate=True)), formats=FORMATS) as file:
            if file.width * file.height > MAX_PIXELS:
                raise ValueError(
                    f"it has {file.width} x {file.height} pixels, more than {MAX_PIXELS}"
                )
            return ImageOps.exif_transpose(file).convert("RGB")
    except Exception as error:  # Pillow raises whatever reading a broken file comes to
        text = f"messages: the image {url!r:.60} cannot be read: {error}"
        raise protocol.invalid_request(text, "messages") from error
