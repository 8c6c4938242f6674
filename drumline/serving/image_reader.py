"""Prompts with images, for models that take them beside tokens.

images = ImageReader(processor)
prompt = images.read("<image> What is this?", ["data:image/png;base64,iVBORw0..."])
"""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Iterator, Sequence
from typing import Any

from drumline.serving import protocol
from drumline.serving.one_by_one import Prompt, inputs_to_text

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_IMAGES, MAX_PIXELS = 64, 32 << 20  # of a request: its files may be a thousandth of them
MAX_INPUTS_NBYTES = 128 << 20  # of what the model takes for all images of a request


class ImageReader:
    """Makes prompts of rendered chats and their images. Raises ApiError for what it refuses.

    processor: transformers', of the model.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def lacks_begin(self, text: str) -> bool:
        """True unless a chat brings the token that begins a text."""
        begin = self._processor.tokenizer.bos_token
        return begin is None or not text.startswith(begin)

    def read(self, text: str, urls: Sequence[str], add_special_tokens: bool) -> Prompt:
        """The prompt of a chat. urls: of its images, in the order of their places in the text."""
        if len(urls) > MAX_IMAGES:
            raise _refused(f"{len(urls)} images are more than {MAX_IMAGES}; send fewer.")
        opened = [_opened(url) for url in urls]
        if (size := sum(image.width * image.height for image in opened)) > MAX_PIXELS:
            raise _refused(f"the images have {size} pixels, more than {MAX_PIXELS}; send fewer.")
        images = [*map(_upright, urls, opened)]
        options = {} if add_special_tokens else {"add_special_tokens": False}
        try:
            made = self._processor(text=text, images=[images], return_tensors="pt", **options)
        except Exception as error:  # each kind of model has its own for images that it rejects
            raise _refused(str(error)) from error
        inputs = {name: value for name, value in made.items() if name != "attention_mask"}
        tokens = inputs.pop("input_ids")[0].tolist()
        if (nbytes := sum(value.nbytes for value in inputs.values())) > MAX_INPUTS_NBYTES:
            raise _refused(
                f"the images come to {nbytes} bytes for the model, more than the "
                f"{MAX_INPUTS_NBYTES} that this server holds for a request; send fewer, or smaller."
            )
        return Prompt(tokens, inputs_to_text(inputs))


def _opened(url: str) -> Any:
    """The image of a data URL, of which the header was read."""
    from PIL import Image

    kind, _, data = url.partition(";base64,")
    if not kind.startswith("data:image/"):
        text = (
            f"the image at {url!r:.60} is not fetched by this server; send its file as "
            "data:image/png;base64,..."
        )
        raise _refused(text)
    with _explained(url):
        return Image.open(io.BytesIO(base64.b64decode(data, validate=True)), formats=FORMATS)


def _upright(url: str, image: Any) -> Any:
    """The whole image in RGB."""
    from PIL import ImageOps

    with _explained(url), image:
        return ImageOps.exif_transpose(image).convert("RGB")


@contextlib.contextmanager
def _explained(url: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # Pillow raises whatever reading a broken file comes to
        raise _refused(f"the image {url!r:.60} cannot be read: {error}") from error


def _refused(reason: str) -> protocol.ApiError:
    return protocol.invalid_request(f"messages: {reason}", "messages")
