"""OpenAI's API over one model on every rank: `serve(path)`, or `python -m drumline serve`."""

from drumline.serving.server import serve

__all__ = ["serve"]
