"""Hyper-parameters of the optimizer, each declared once: Megatron's flags are generated from these fields."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Any


class Method(enum.StrEnum):
    """Which combination of factor statistics and their application; see `megatron.shampoo.methods`."""

    SHAMPOO = "shampoo"
    SOAP = "soap"
    KL_SOAP = "kl-soap"
    KL_SHAMPOO = "kl-shampoo"
    ONE_SIDED = "one-sided"


class Side(enum.StrEnum):
    """Which sides of a matrix have a factor."""

    BOTH = "both"
    LEFT = "left"
    RIGHT = "right"
    SMALLER = "smaller"


class Grafting(enum.StrEnum):
    """Which optimizer's step norm the search direction of a block takes over."""

    NONE = "none"
    SGD = "sgd"
    ADAGRAD = "adagrad"
    RMSPROP = "rmsprop"
    ADAM = "adam"


class MomentumPlacement(enum.StrEnum):
    """Whether momentum averages gradients (before preconditioning) or search directions (after it)."""

    BEFORE = "before"
    AFTER = "after"


class WeightDecay(enum.StrEnum):
    """What the weight decay of a parameter group means for preconditioned parameters."""

    DECOUPLED = "decoupled"
    INDEPENDENT = "independent"
    L2 = "l2"


class Solver(enum.StrEnum):
    """How inverse roots and eigenbases are computed."""

    AUTO = "auto"
    EIGH = "eigh"
    QR = "qr"
    NEWTON = "newton"
    NEWTON_DB = "newton-db"


AUTO_SOLVER = Solver.QR
"""What `auto` stands for. Source: docs/methods.md."""


class Precision(enum.StrEnum):
    """Data type that a part of the state is stored in."""

    FP32 = "fp32"
    BF16 = "bf16"


class Qkv(enum.StrEnum):
    """How a fused query-key-value projection is taken apart."""

    SPLIT = "split"
    HEADS = "heads"
    FUSED = "fused"


class Ownership(enum.StrEnum):
    """Which data-parallel rank computes a block whose parameters are sharded."""

    LOCAL = "local"
    BALANCED = "balanced"


def _knob(default: Any, text: str, allowed: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": text, "allowed": allowed})


def _choices(kind: type[enum.Enum]) -> str:
    """The values of an enumeration, as a sentence has them."""
    *others, last = (member.value for member in kind)
    return f"{', '.join(others)} or {last}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ShampooConfig:
    """Settings of the Kronecker-factored part of the optimizer.

    Learning rate, betas, Adam's epsilon and weight decay are not here: they come with the parameter groups,
    as for any `torch.optim.Optimizer`.
    """

    method: Method = _knob(  # noqa: RUF009 (a field, like its neighbours: ruff knows dataclasses.field alone)
        Method.SHAMPOO,
        "how gradients are preconditioned: inverse roots (shampoo, one-sided), Adam in the factors' eigenbasis (soap), "
        "or with factors whitened by each other (kl-soap, kl-shampoo)",
        _choices(Method),
    )
    """Default: by the comparison in docs/methods.md."""

    root: int | None = _knob(
        None,
        "p of the inverse p-th roots of --shampoo-method shampoo and one-sided "
        "(default: 4 where a matrix has two factors, 2 where it has one)",
        "2 or 4, with --shampoo-method shampoo or one-sided",
    )
    """Two roots with p = 2 are trace scaled. Source: Gupta et al. 2018 for 4; arXiv:2506.03595 for 2."""

    side: Side | None = _knob(  # noqa: RUF009
        None,
        "sides of a matrix that have a factor; smaller: that of fewer rows or columns "
        "(default: both, for --shampoo-method one-sided smaller)",
        "both, left, right or smaller; the kl methods need both, one-sided needs another than both",
    )
    """Sides."""

    grafting: Grafting | None = _knob(  # noqa: RUF009
        None,
        "the optimizer whose step norm each block's search direction takes over "
        "(default: adam for --shampoo-method shampoo and one-sided, none for the others)",
        _choices(Grafting),
    )
    """`none` leaves the norm that the method gives."""

    momentum_placement: MomentumPlacement = _knob(  # noqa: RUF009
        MomentumPlacement.BEFORE,
        "momentum averages gradients and is preconditioned (before), or averages search directions (after)",
        _choices(MomentumPlacement),
    )
    """Distributed Shampoo's is `before`."""

    nesterov: bool = _knob(
        False, "Nesterov momentum: the step looks ahead by the newest gradient (or direction)", "true or false"
    )
    """Source: Dozat 2016 for its use with bias correction."""

    bias_correction: bool = _knob(
        True,
        "correct the first and second moments for their start at zero (factor averages always are)",
        "true or false",
    )
    """As Adam's."""

    update_rms_clip: float | None = _knob(
        None,
        "largest root mean square of a block's search direction; longer ones are scaled down; 0: no limit "
        "(default: 2 without grafting, no limit with it)",
        "a number >= 0",
    )
    """Elementwise root mean square; Adam's steps have about 1. Stops the spike of a gradient between two refreshes."""

    weight_decay_mode: WeightDecay = _knob(  # noqa: RUF009
        WeightDecay.DECOUPLED,
        "decoupled: weights shrink by learning rate x decay; independent: by decay x learning rate / its maximum; "
        "l2: the decay is added to the gradient",
        _choices(WeightDecay),
    )
    """Source: Loshchilov and Hutter (arXiv:1711.05101); Wortsman et al. (arXiv:2309.14322) for `independent`."""

    solver: Solver = _knob(  # noqa: RUF009
        Solver.AUTO,
        "eigh: eigendecomposition; qr: power iteration from the previous eigenbasis; newton, newton-db: coupled Newton "
        "and Newton-Denman-Beavers iterations (for roots only); auto: the one that docs/methods.md measured as best",
        _choices(Solver) + "; newton and newton-db with --shampoo-method shampoo or one-sided",
    )
    """See `megatron.shampoo.preconditioner.ladder` for what follows a failure."""

    block_size: int = _knob(
        1024,
        "largest side of a block, the sub-matrix with factor matrices of its own",
        "an integer >= 1",
    )
    """Rows or columns. Source of the default: Distributed Shampoo (arXiv:2309.06497, section 4) and DASH."""

    max_dim: int | None = _knob(
        None,
        "longest side of a matrix that has a factor: with one longer side a matrix is preconditioned on the other side "
        "alone, with two it takes AdamW, and so do all with 0 (default: no limit, blocks bound the factors)",
        "an integer >= 0",
    )
    """Rows or columns of the logical matrix. Source: SOAP's max_precond_dim (arXiv:2409.11321)."""

    qkv: Qkv = _knob(  # noqa: RUF009
        Qkv.SPLIT,
        "the matrices in a fused query-key-value projection: queries, keys and values (split; narrow keys and values "
        "stay together where that is cheaper), those of each head (heads), or the projection as it is (fused)",
        _choices(Qkv),
    )
    """Logical matrices, the same at every tensor-parallel size."""

    tp_alignment: int | None = _knob(
        None,
        "number of equal segments into which a tensor-parallel dimension is cut before it is cut into blocks; a run "
        "with the same value is the same run at every tensor-parallel size that divides it "
        "(default: the tensor-parallel size)",
        "a multiple of the tensor-parallel size",
    )
    """Segments. None stands for the current tensor-parallel size."""

    ownership: Ownership = _knob(  # noqa: RUF009
        Ownership.LOCAL,
        "the data-parallel rank that computes a block: the one that holds most of it (local), or one with less work "
        "where that one has too much, such as next to a rank that holds embeddings alone (balanced)",
        _choices(Ownership),
    )
    """Changes who computes and what travels, not the result."""

    refresh_interval: int = _knob(
        10,
        "steps between two computations of a block's inverse roots or eigenbases; the blocks take turns, so that step "
        "time is flat",
        "an integer >= 1",
    )
    """Steps. Default: SOAP (arXiv:2409.11321) and DASH (arXiv:2602.02016) lose little up to 10."""

    refresh_tolerance: float = _knob(
        0.0,
        "skip a refresh while the old eigenbasis still fits: while the off-diagonal part of the factor in it is at "
        "most this share of its norm",
        "a number in [0, 1); above 0 only where an eigenbasis is kept: with --shampoo-method shampoo and one-sided by "
        "--shampoo-solver auto and qr",
    )
    """Share of the Frobenius norm. Source: Purifying Shampoo (arXiv:2506.03595); 0.1 there."""

    factor_beta: float = _knob(
        0.95,
        "decay of the exponential moving average of the factor matrices, bias-corrected",
        "a number in [0, 1)",
    )
    """Per step."""

    epsilon: float = _knob(
        1e-6,
        "damping: added to the eigenvalues of a factor matrix, relative to the largest (inverse roots), or to the "
        "second moments in the eigenbasis, relative to their mean (soap, kl-soap)",
        "a number in (0, 1)",
    )
    """Relative, so that the update does not change when all gradients are scaled."""

    factor_dtype: Precision = _knob(  # noqa: RUF009
        Precision.FP32,
        "data type that factor matrices are stored in",
        _choices(Precision) + "; bf16 with --shampoo-factor-beta up to 0.99",
    )
    """Products are computed in float32 all the same."""

    root_dtype: Precision = _knob(  # noqa: RUF009
        Precision.FP32,
        "data type that inverse roots and eigenbases are stored in",
        _choices(Precision)
        + "; bf16 for fourth roots alone: --shampoo-method shampoo with two factors or --shampoo-root 4",
    )
    """Products are computed in float32 all the same. An inverse square root of a factor of low rank has entries a
    thousand times larger off the gradient than along it, and Adam divides by what a basis leaks: 8 bits turn such steps
    around."""

    start_step: int = _knob(
        1,
        "first step that uses the preconditioner; before it a block takes its grafting optimizer's step while its "
        "factor matrices fill",
        "an integer >= 1; above 1 the methods soap, kl-soap and kl-shampoo need grafting",
    )
    """Step number, counted from 1."""

    log_interval: int = _knob(
        100,
        "steps between two writes of the metrics to the log and to TensorBoard (0: never)",
        "an integer >= 0",
    )
    """Steps."""

    check_replicas: int = _knob(
        0,
        "steps between two comparisons of all parameters over the data-parallel ranks that hold copies of them; the "
        "run ends where a copy has drifted (0: never)",
        "an integer >= 0",
    )
    """Steps."""

    solver_timeout: float = _knob(
        600.0,
        "seconds that the refreshes of one step may take on a rank before the run is ended, since an eigensolver that "
        "hangs cannot be interrupted (0: for ever)",
        "a number >= 0",
    )
    """Seconds. The default is that of Megatron's --distributed-timeout-minutes, after which other ranks give up."""

    @property
    def averages_gradients(self) -> bool:
        """Whether momentum comes before preconditioning."""
        return self.momentum_placement is MomentumPlacement.BEFORE

    def __post_init__(self) -> None:
        """Check every field by itself, then those that depend on each other.

        Raises:
            ValueError: a value outside its range; names the field, the value and what is allowed.
        """
        for name, kind in _ENUMS.items():
            object.__setattr__(self, name, self._member(name, kind))
        for name, least in _LEAST.items():
            self._require(name, _is_int(getattr(self, name)) and getattr(self, name) >= least)
        for name in ("nesterov", "bias_correction"):
            self._require(name, isinstance(getattr(self, name), bool))
        self._require(
            "tp_alignment", self.tp_alignment is None or (_is_int(self.tp_alignment) and self.tp_alignment > 0)
        )
        self._require("max_dim", self.max_dim is None or (_is_int(self.max_dim) and self.max_dim >= 0))
        self._require("factor_beta", _is_real(self.factor_beta) and 0.0 <= self.factor_beta < 1.0)
        self._require("epsilon", _is_real(self.epsilon) and 0.0 < self.epsilon < 1.0)
        self._require("refresh_tolerance", _is_real(self.refresh_tolerance) and 0.0 <= self.refresh_tolerance < 1.0)
        timeout = self.solver_timeout
        self._require("solver_timeout", _is_real(timeout) and timeout >= 0.0)
        clip = self.update_rms_clip
        self._require("update_rms_clip", clip is None or (_is_real(clip) and clip >= 0.0))
        self._check_combinations()

    def _check_combinations(self) -> None:
        is_root = self.method in (Method.SHAMPOO, Method.ONE_SIDED)
        self._require("root", self.root is None or (_is_int(self.root) and self.root in (2, 4) and is_root))
        if self.method in (Method.KL_SOAP, Method.KL_SHAMPOO):
            self._require("side", self.side in (None, Side.BOTH))
        if self.method is Method.ONE_SIDED:
            self._require("side", self.side is not Side.BOTH)
        self._require("solver", is_root or self.solver not in (Solver.NEWTON, Solver.NEWTON_DB))
        keeps_basis = not is_root or (AUTO_SOLVER if self.solver is Solver.AUTO else self.solver) is Solver.QR
        self._require("refresh_tolerance", self.refresh_tolerance == 0.0 or keeps_basis)
        # bfloat16 has 8 bits: a step of a slower average is lost in rounding.
        self._require("factor_dtype", self.factor_dtype is Precision.FP32 or self.factor_beta <= 0.99)
        fourth = is_root and (self.root == 4 or (self.root is None and self._has_two_factors()))
        self._require("root_dtype", self.root_dtype is Precision.FP32 or fourth)
        grafts = self.grafting is not Grafting.NONE if is_root else self.grafting not in (None, Grafting.NONE)
        self._require("start_step", self.start_step == 1 or is_root or grafts)

    def _has_two_factors(self) -> bool:
        """Whether every preconditioned matrix has a factor on both sides."""
        return self.method is not Method.ONE_SIDED and self.side in (None, Side.BOTH) and self.max_dim is None

    def _member(self, name: str, kind: type[enum.Enum]) -> enum.Enum | None:
        value = getattr(self, name)
        if value is None and _DEFAULTS[name] is None:
            return None
        try:
            return kind(value)
        except ValueError:
            self._require(name, False)
            raise

    def _require(self, name: str, holds: bool) -> None:
        if holds:
            return
        allowed = {field.name: field.metadata["allowed"] for field in dataclasses.fields(self)}[name]
        raise ValueError(f"{flag_of(name)} {getattr(self, name)!s}: allowed is {allowed}")


_ENUMS: dict[str, type[enum.Enum]] = {
    "method": Method,
    "side": Side,
    "grafting": Grafting,
    "momentum_placement": MomentumPlacement,
    "weight_decay_mode": WeightDecay,
    "solver": Solver,
    "qkv": Qkv,
    "ownership": Ownership,
    "factor_dtype": Precision,
    "root_dtype": Precision,
}
_LEAST = {"block_size": 1, "refresh_interval": 1, "start_step": 1, "log_interval": 0, "check_replicas": 0}
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(ShampooConfig)}


def flag_of(field_name: str) -> str:
    """Command-line flag of a `ShampooConfig` field, e.g. `--shampoo-block-size`."""
    return "--shampoo-" + field_name.removesuffix("_mode").replace("_", "-")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
