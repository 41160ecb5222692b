"""Makes a task from its dotted path. Every mistake in a job file becomes one message that names the
path and the remedy.
"""

import importlib
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from pipelinerl_actor.task import Prompt, Rollout, Task, TaskName, Verdict
from pipelinerl_common.errors import SettingsError
from pipelinerl_common.settings import describe_fault
from pipelinerl_common.text import did_you_mean


class FunctionTask(Task):
    """A task that is one `async def` function: it makes its own prompt."""

    def __init__(self, function: Callable[..., Awaitable[Verdict]], args: dict[str, Any]) -> None:
        self._function = function
        self._args = args

    def prompt(self, index: int) -> Prompt:
        del index
        return Prompt(())

    async def rollout(self, rollout: Rollout) -> Verdict:
        return await self._function(rollout, **self._args)


def load_task(name: TaskName) -> Task:
    """The task of `name`. Raises SettingsError for one that cannot be imported, is not a task, or
    has other args.
    """
    target = _import(name.path)
    if inspect.isclass(target) and issubclass(target, Task):
        if inspect.isabstract(target):
            missing = ", ".join(sorted(target.__abstractmethods__))
            raise _path_fault(name.path, f"the class lacks {missing}")
        return _construct(target, name)
    if inspect.isfunction(target) and not inspect.iscoroutinefunction(target):
        return _construct(target, name)
    if inspect.iscoroutinefunction(target):
        parameters = list(inspect.signature(target).parameters.values())
        if not parameters or parameters[0].kind is inspect.Parameter.KEYWORD_ONLY:
            raise _path_fault(name.path, "the function must take a Rollout as its first argument")
        return FunctionTask(target, _check_args(target, parameters[1:], name))
    raise SettingsError(
        f"spec.task.path={name.path!r} is neither a subclass of pipelinerl_actor.task.Task nor a "
        f"function, but a {type(target).__name__}"
    )


def _path_fault(path: str, what: str) -> SettingsError:
    return SettingsError(f"spec.task.path={path!r}: {what}")


def _import(path: str) -> Any:
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # Either the task's own module is missing, or one that it imports.
        if error.name is not None and (
            module_name == error.name or module_name.startswith(f"{error.name}.")
        ):
            remedy = "install the package that holds it, or put its folder on PYTHONPATH"
            raise _path_fault(path, f"there is no module {error.name!r}; {remedy}") from error
        raise _path_fault(
            path, f"{module_name} imports {error.name!r}, which is not installed"
        ) from error
    except Exception as error:
        raise _path_fault(
            path, f"importing {module_name} failed with {type(error).__name__}: {error}"
        ) from error
    if not hasattr(module, attribute):
        hint = did_you_mean(
            attribute, [key for key in vars(module) if not key.startswith("_")], most=3
        )
        raise _path_fault(path, f"{module_name} has no {attribute!r}{hint}")
    return getattr(module, attribute)


def _construct(target: Callable[..., Any], name: TaskName) -> Task:
    """The task that the class or function `target` makes."""
    parameters = list(inspect.signature(target).parameters.values())
    hinted = target.__init__ if inspect.isclass(target) else target
    args = _check_args(hinted, [each for each in parameters if each.name != "seed"], name)
    if any(each.name == "seed" for each in parameters):
        args["seed"] = name.seed
    try:
        made = target(**args)
    except SettingsError:
        raise
    except Exception as error:
        raise SettingsError(
            f"spec.task: {name.path} with args {dict(name.args)} failed to start with "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(made, Task):
        raise _path_fault(
            name.path,
            f"the function returned a {type(made).__name__}; it must "
            "return a Task, or be an 'async def' function that takes a Rollout",
        )
    return made


def _check_args(
    function: Callable[..., Any], parameters: list[inspect.Parameter], name: TaskName
) -> dict[str, Any]:
    """`name.args` validated against the parameters' names and annotations."""
    keyword = [
        each
        for each in parameters
        if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD, each.POSITIONAL_ONLY)
    ]
    is_open = any(each.kind is each.VAR_KEYWORD for each in parameters)
    names = [each.name for each in keyword]
    unknown = [key for key in name.args if key not in names]
    if unknown and not is_open:
        raise SettingsError(
            f"spec.task.args: {name.path} has no argument {unknown[0]!r}; it has "
            f"{', '.join(names) or 'none'}{did_you_mean(unknown[0], names)}"
        )
    missing = [
        each.name for each in keyword if each.default is each.empty and each.name not in name.args
    ]
    if missing:
        raise SettingsError(f"spec.task.args: {name.path} needs the argument {missing[0]!r}")
    return {**name.args, **_validate(function, keyword, name)}


def _validate(
    function: Callable[..., Any], parameters: list[inspect.Parameter], name: TaskName
) -> dict[str, Any]:
    hints = get_type_hints(function)
    given = [each for each in parameters if each.name in name.args]
    # The prefix is for pydantic, whose fields must not have the names of a model's methods.
    fields: dict[str, Any] = {
        f"arg_{each.name}": (hints.get(each.name, Any), Field(..., alias=each.name))
        for each in given
    }
    model: type[BaseModel] = create_model(
        "Args", __config__=ConfigDict(arbitrary_types_allowed=True), **fields
    )
    try:
        checked = model.model_validate({each.name: name.args[each.name] for each in given})
    except ValidationError as error:
        faults = [describe_fault(fault, model) for fault in error.errors()]
        raise SettingsError(f"spec.task.args of {name.path}: {'; '.join(faults)}") from error
    return {each.name: getattr(checked, f"arg_{each.name}") for each in given}
