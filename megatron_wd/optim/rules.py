"""What decays, and how fast each parameter learns: an ordered list of rules over global names, resolved
once into an explicit table.

The first rule that meets a parameter decides. Every parameter is decided by exactly one rule, and every
rule decides at least one parameter of the whole model, whatever part of it a rank holds.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron_wd.config import DECAY_PRESETS, Config, DecayRuleConfig, UserError
from megatron_wd.optim.schedule import decay_factor, learning_rate

# Attention and MLP matrices: what AdamH keeps at a fixed norm and what Muon orthogonalises.
HIDDEN_MATRICES = (
    "decoder.layers.*.linear_qkv.weight",
    "decoder.layers.*.linear_proj.weight",
    "decoder.layers.*.linear_fc1.weight",
    "decoder.layers.*.linear_fc2.weight",
)


@dataclass(frozen=True)
class ParameterRule:
    """What was decided for one parameter of the whole model.

    Attributes:
        name: global name, the same on every layout.
        shape: of the whole tensor.
        rule: what decided: a rule's pattern or a preset's name.
        weight_decay: its coefficient before `optim.decay_schedule`.
        lr_multiplier: of the learning rate.
        optimizer: "adamw", or what updates it instead ("adamh", "muon").
    """

    name: str
    shape: tuple[int, ...]
    rule: str
    weight_decay: float
    lr_multiplier: float
    optimizer: str


@dataclass(frozen=True)
class Rates:
    """What one step does to a parameter besides where the gradient leads.

    Attributes:
        lr: learning rate; under AdamH the effective rate.
        weight_decay: theta <- (1 - lr weight_decay) theta before the step (AdamW).
        independent_decay: theta <- (1 - independent_decay) theta before the step.
        is_hyperball: whether AdamH updates it, at a fixed norm.
    """

    lr: float
    weight_decay: float = 0.0
    independent_decay: float = 0.0
    is_hyperball: bool = False

    @property
    def decayed(self) -> float:
        """d, the part of the weight that decays: theta <- (1 - d) theta."""
        return self.lr * self.weight_decay + self.independent_decay


def rates_at(step: int, rule: ParameterRule, config: Config) -> Rates:
    """Rate and decay of a parameter at a step."""
    optim = config.optim
    lr = learning_rate(step, config) * rule.lr_multiplier
    decay = rule.weight_decay * decay_factor(step, config)
    is_hyperball = rule.optimizer == "adamh"
    if rule.optimizer != "adamw":
        assert optim.matrix_lr is not None, "validate() asks for it"
        lr *= optim.matrix_lr / optim.lr
    if optim.decay_mode == "independent":
        return Rates(lr, 0.0, decay, is_hyperball)
    return Rates(lr, decay, 0.0, is_hyperball)


@dataclass(frozen=True)
class _Rule:
    """A rule of the config or of a preset, in one form."""

    config: DecayRuleConfig
    preset: str | None = None

    @property
    def label(self) -> str:
        ndim = "" if self.config.ndim is None else f" ndim={self.config.ndim}"
        return self.preset or f"{self.config.match}{ndim}"

    def meets(self, name: str, shape: tuple[int, ...]) -> bool:
        fits = self.config.ndim is None or self.config.ndim == len(shape)
        return fits and fnmatch.fnmatchcase(name, self.config.match)

    def weight_decay(self, default: float) -> float:
        if self.config.weight_decay is not None:
            return self.config.weight_decay
        multiplier = 1.0 if self.config.multiplier is None else self.config.multiplier
        return multiplier * default


def is_hidden_matrix(name: str) -> bool:
    """Whether a parameter is a matrix of attention or MLP."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in HIDDEN_MATRICES)


def resolve_rules(
    shapes: Mapping[str, tuple[int, ...]], config: Config
) -> dict[str, ParameterRule]:
    """Decides every parameter of a model.

    Args:
        shapes: global name -> shape of the whole tensor, of all ranks together.
        config: the run; of `optim` what decays, and of both what a step takes of a weight.

    Returns:
        The table by name, in the order of the layers.

    Raises:
        UserError: a rule decides no parameter, a parameter is decided by no rule, a rule decays a matrix
            whose norm is kept fixed, or a step would take a whole weight. All mistakes at once, each with
            a remedy.
    """
    optim = config.optim
    rules = [_Rule(rule) for rule in optim.decay_rules]
    if optim.decay is not None:
        rules += [_Rule(rule, optim.decay) for rule in DECAY_PRESETS[optim.decay]]
    decided: dict[str, tuple[_Rule, float]] = {}
    undecided: list[str] = []
    for name in sorted(shapes, key=_natural):
        rule = next((rule for rule in rules if rule.meets(name, shapes[name])), None)
        if rule is None:
            undecided.append(name)
        else:
            decided[name] = (rule, rule.weight_decay(optim.weight_decay))
    problems = list(_unused(rules, decided, shapes))
    if undecided:
        problems.append(
            f"no rule of optim.decay_rules meets {_some(undecided)}; add a last rule such as "
            "{match: '*', multiplier: 1.0}, or name a preset in optim.decay"
        )
    table = {}
    for name, (rule, decay) in decided.items():
        fixed = optim.optimizer == "adamh" and is_hidden_matrix(name)
        if fixed and decay != 0.0 and rule.preset is None:
            problems.append(
                f"the rule {rule.label!r} of optim.decay_rules decays {name}, but optim.optimizer=adamh "
                "keeps the norm of that matrix fixed; exclude it from the rule, or give it weight_decay: 0"
            )
        optimizer = optim.optimizer if is_hidden_matrix(name) else "adamw"
        label = "adamh: fixed norm" if fixed and rule.preset is not None else rule.label
        table[name] = ParameterRule(
            name,
            shapes[name],
            label,
            0.0 if fixed else decay,
            rule.config.lr_multiplier,
            optimizer,
        )
    problems += _whole_weights(table.values(), config)
    if problems:
        raise UserError("\n".join(dict.fromkeys(problems)))
    return table


def _whole_weights(rules: Iterable[ParameterRule], config: Config) -> Iterable[str]:
    """One message for each rule by which a step takes a weight as a whole."""
    corners = [
        point.tokens // config.train.step_tokens for point in config.optim.decay_schedule.points
    ]
    steps = {1, config.warmup_steps, *corners, *(corner + 1 for corner in corners), config.steps}
    steps |= {1 + (config.steps - 1) * i // 200 for i in range(201)}
    steps = {step for step in steps if 1 <= step <= config.steps}
    for rule in {(r.rule, r.weight_decay, r.lr_multiplier, r.optimizer): r for r in rules}.values():
        taken = max((rates_at(step, rule, config).decayed, step) for step in steps)
        if taken[0] >= 1.0:
            yield (
                f"the rule {rule.rule!r} takes {taken[0]:g} of a weight at step {taken[1]:,}, such as of "
                f"{rule.name}; it must be below 1 (optim.decay_mode is {config.optim.decay_mode}: "
                + (
                    "learning rate x weight decay"
                    if config.optim.decay_mode == "coupled"
                    else "weight decay"
                )
                + ")"
            )


def _unused(
    rules: list[_Rule],
    decided: Mapping[str, tuple[_Rule, float]],
    shapes: Mapping[str, tuple[int, ...]],
) -> Iterable[str]:
    """One message for each rule of the config that decides nothing."""
    for index, rule in enumerate(rules):
        if rule.preset is not None or any(used is rule for used, _ in decided.values()):
            continue
        place = f"optim.decay_rules.{index} ({rule.label!r})"
        met = [name for name, shape in shapes.items() if rule.meets(name, shape)]
        if met:
            first = decided[met[0]][0]
            yield (
                f"{place} decides nothing: all it meets, such as {met[0]}, was decided by the earlier rule "
                f"{first.label!r}; move it up or remove it"
            )
            continue
        of_any_ndim = [name for name in shapes if fnmatch.fnmatchcase(name, rule.config.match)]
        if of_any_ndim:
            found = sorted({len(shapes[name]) for name in of_any_ndim})
            yield (
                f"{place} meets no parameter: {_some(of_any_ndim)} has {found} dimensions, not "
                f"{rule.config.ndim}"
            )
            continue
        near = difflib.get_close_matches(rule.config.match, shapes, n=3, cutoff=0.3)
        hint = f"; near it are {', '.join(near)}" if near else ""
        yield (
            f"{place} meets no parameter{hint}. Patterns are compared with the whole name; `*` stands for "
            "anything"
        )


def table_text(rows: Iterable[ParameterRule]) -> str:
    """The table as tab-separated values, the content of weight_decay.tsv."""
    lines = ["parameter\tshape\trule\tweight_decay\tlr_multiplier\toptimizer"]
    for row in rows:
        shape = "x".join(map(str, row.shape))
        lines.append(
            f"{row.name}\t{shape}\t{row.rule}\t{row.weight_decay:g}\t{row.lr_multiplier:g}\t{row.optimizer}"
        )
    return "\n".join(lines) + "\n"


def _some(names: list[str], limit: int = 3) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def _natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """Sorts layer 10 behind layer 9."""
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in name.split("."))
