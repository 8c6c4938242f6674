"""Overrides of what generate() asks of a model inside, behind verbs of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drumline.contact.generate_options import Criteria
from drumline.contact.passes import is_output


class ModelHooks:
    """Mixed into the class of a model; each verb leaves everything as it is unless overridden."""

    def may_compile(self) -> bool:
        """True if generate() may compile the model, as it does for a static cache on a GPU."""
        return True

    def outputs_to_keep(self, outputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The part of the outputs of a generation that Whisper copies into its result."""
        return outputs

    def stopping_criteria(self, criteria: Criteria) -> Criteria:
        """The criteria by which generate() stops, of those that it has put together."""
        return criteria

    def _valid_auto_compile_criteria(self, *args: Any, **kwargs: Any) -> bool:
        method = super()._valid_auto_compile_criteria  # type: ignore[misc]
        return self.may_compile() and bool(method(*args, **kwargs))

    def _postprocess_outputs(self, *args: Any, **kwargs: Any) -> Any:
        kept = map(self._kept, args)
        named = {name: self._kept(value) for name, value in kwargs.items()}
        return super()._postprocess_outputs(*kept, **named)  # type: ignore[misc]

    def _kept(self, argument: Any) -> Any:
        if not is_output(argument):
            return argument
        return type(argument)(**self.outputs_to_keep(argument))

    def _get_stopping_criteria(self, *args: Any, **kwargs: Any) -> Criteria:
        criteria = super()._get_stopping_criteria(*args, **kwargs)  # type: ignore[misc]
        return self.stopping_criteria(criteria)
