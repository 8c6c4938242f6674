"""Functions of an engine that is not installed, with the signatures recorded of it."""

import ast
import inspect


def refusing(parameters):
    """A function with these parameters, as drumline.engines.parameters lists them, which raises."""

    def function(*args, **kwargs):
        raise NotImplementedError

    return with_signature(function, parameters)


def with_signature(function, parameters):
    listed = []
    for name, _, value in (item.partition("=") for item in parameters):
        default = ast.literal_eval(value) if value else inspect.Parameter.empty
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        listed.append(inspect.Parameter(name, kind, default=default))
    function.__signature__ = inspect.Signature(listed)
    return function
