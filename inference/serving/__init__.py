"""OpenAI's API over one model on every rank: `serve(path)`, or `python -m inference serve`."""

from inference.serving.serve import serve

__all__ = ["serve"]
