"""Command-line arguments: `--optimizer shampoo`, and one flag for every field of `ShampooConfig`.

Megatron knows a fixed list of optimizers and treats every unknown one as an emerging optimizer that excludes its
distributed optimizer. So what Megatron sees is `adam`, whose rules for parameter groups, decay and schedules are
the ones we want; the user's word is kept in `args.second_order_optimizer` and shown wherever arguments are shown.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import types
import typing
from collections.abc import Sequence
from typing import Any

from megatron.shampoo.config import ShampooConfig, flag_of
from megatron.shampoo.methods import recipe_of

OPTIMIZERS = ("shampoo",)
"""Words for `--optimizer` that this package adds to Megatron's."""

STANDS_FOR = "adam"
"""What Megatron sees in place of those words."""


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Teach Megatron's parser our optimizers and flags.

    Args:
        parser: the parser with all of Megatron's arguments.

    Returns:
        The same parser.
    """
    _extend_optimizer_choices(parser)
    group = parser.add_argument_group(title="shampoo", description="used with --optimizer shampoo")
    for field in dataclasses.fields(ShampooConfig):
        group.add_argument(
            flag_of(field.name),
            dest=_dest(field.name),
            default=None,  # None tells a flag that was not given from one that was
            help=_help_text(field),
            **_value_type(field),
        )
    return parser


def is_ours(args: Any) -> bool:
    """Whether the user asked for an optimizer of this package."""
    return getattr(args, "second_order_optimizer", None) is not None


def config_of(args: Any) -> ShampooConfig:
    """The optimizer's configuration from parsed arguments; what was not given has its default.

    Raises:
        ValueError: a value out of range; names the flag.
    """
    given = {field.name: getattr(args, _dest(field.name), None) for field in dataclasses.fields(ShampooConfig)}
    return ShampooConfig(**{name: value for name, value in given.items() if value is not None})


def resolve_(args: Any, config: ShampooConfig) -> None:
    """Put the values that stand for flags that were not given into parsed arguments, as plain numbers and words.

    Megatron stores its arguments in checkpoints: those must say what a run did after a default has changed too.
    """
    config = dataclasses.replace(config, solver=recipe_of(config).solver)
    for field in dataclasses.fields(ShampooConfig):
        value = getattr(config, field.name)
        setattr(args, _dest(field.name), value.value if isinstance(value, enum.Enum) else value)


def given_flags(args: Any) -> list[str]:
    """Our flags that the user gave, with their values."""
    names = [field.name for field in dataclasses.fields(ShampooConfig)]
    return [f"{flag_of(name)} {getattr(args, _dest(name))}" for name in names if getattr(args, _dest(name)) is not None]


def shown_arguments(args: argparse.Namespace) -> argparse.Namespace:
    """Arguments as the user thinks of them, for printing: the optimizer's own word, flags with their defaults."""
    shown = argparse.Namespace(**vars(args))
    if is_ours(args):
        shown.optimizer = args.second_order_optimizer
        for field in dataclasses.fields(ShampooConfig):
            value = getattr(args, _dest(field.name))
            setattr(shown, _dest(field.name), field.default if value is None else value)
    return shown


def _dest(field_name: str) -> str:
    return "shampoo_" + field_name


def _help_text(field: dataclasses.Field) -> str:
    text = field.metadata["help"]
    if field.default is None:
        return text
    default = field.default.value if isinstance(field.default, enum.Enum) else field.default
    return f"{text} (default: {default})"


def _value_type(field: dataclasses.Field) -> dict[str, Any]:
    kind = typing.get_type_hints(ShampooConfig)[field.name]
    if isinstance(kind, types.UnionType):
        kind = next(option for option in typing.get_args(kind) if option is not type(None))
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if issubclass(kind, enum.Enum):
        return {"choices": [member.value for member in kind]}
    return {"type": kind}


class _OptimizerAction(argparse.Action):
    """Stores Megatron's word for the optimizer, and ours beside it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Translate one `--optimizer`; the last one given counts."""
        ours = values in OPTIMIZERS
        setattr(namespace, self.dest, STANDS_FOR if ours else values)
        namespace.second_order_optimizer = values if ours else None


def _extend_optimizer_choices(parser: argparse.ArgumentParser) -> None:
    theirs = next(action for action in parser._actions if "--optimizer" in action.option_strings)
    ours = _OptimizerAction(
        option_strings=theirs.option_strings,
        dest=theirs.dest,
        default=theirs.default,
        type=str,
        choices=[*(theirs.choices or ()), *OPTIMIZERS],
        help=f"{theirs.help} {', '.join(OPTIMIZERS)}: Kronecker-factored, see the shampoo arguments.",
    )
    for container in (parser._actions, *(group._group_actions for group in parser._action_groups)):
        if theirs in container:
            container[container.index(theirs)] = ours
    for option in theirs.option_strings:
        parser._option_string_actions[option] = ours
    parser.set_defaults(second_order_optimizer=None)
