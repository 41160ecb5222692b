"""A job file's text: YAML that means here what it means to `kubectl apply`.

Unlike PyYAML by itself, 1e-6 is a number, 12:30 and 2026-11-30 are text, and a key may not be there
twice.
"""

import re
from typing import Any, Final

import yaml
from yaml.composer import ComposerError

_INT: Final = r"[-+]?(?:0b[0-1_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*)"
_FLOAT: Final = r"[-+]?(?:\.[0-9][0-9_]*|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
_TAG: Final = "tag:yaml.org,2002:"
_REPLACED: Final = {_TAG + "int", _TAG + "float", _TAG + "timestamp"}


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            name, line = (key.tag, str(key.value)), key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and name in lines:
                problem = (
                    f"{key.value!r} is there twice, in lines {lines[name]} and {line}: put "
                    "both together"
                )
                raise ComposerError(None, None, problem, key.start_mark)
            lines[name] = line
        return node


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_TAG + "int", re.compile(rf"^(?:{_INT})$"), list("-+0123456789"))
_Loader.add_implicit_resolver(_TAG + "float", re.compile(rf"^(?:{_FLOAT})$"), list("-+0123456789."))


class _Dumper(yaml.SafeDumper):
    """Quotes text that PyYAML by itself or `_Loader` would take for something else."""


_Dumper.add_implicit_resolver(_TAG + "float", re.compile(rf"^(?:{_FLOAT})$"), list("-+0123456789."))


def read_yaml(text: str) -> Any:
    """Raises ValueError that says where and what is wrong."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def write_yaml(document: Any) -> str:
    """Text that `read_yaml` gives back as it was."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
