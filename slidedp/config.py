"""What a user may set: plain dataclasses, each field with its unit and default.

The same classes serve Python, the command line (TOML) and the widgets. `Config.from_dict` refuses
unknown or contradictory settings with one line that names the field and the accepted values.
"""

import dataclasses
import math
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from slidedp.checks import AUTO, at_least, check_types, choice, from_dict
from slidedp.errors import ConfigError
from slidedp.fielddocs import with_field_docs
from slidedp.layout import Layout
from slidedp.tables import html_table

LR_SCHEDULES = ("constant", "linear", "cosine", "wsd")
PACKINGS = ("wrapped", "bounded", "padded")
OVER_LONG = ("refuse", "cut", "drop")
TIMELINE_EVERY = 10
"""Steps between two full timelines in the telemetry; the second step of each is recorded."""
EXPERTS_EVERY = 100
"""The same for the tokens of every expert: thousands of numbers in a large mixture."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def _changed(settings: Any) -> dict[str, Any]:
    """The settings that differ from their defaults."""
    changed = {}
    for setting in dataclasses.fields(settings):
        value, factory = getattr(settings, setting.name), setting.default_factory
        default = setting.default if factory is dataclasses.MISSING else factory()
        if value != default:
            changed[setting.name] = value
    return changed


def _short(settings: Any) -> str:
    """What differs from the defaults, as Python."""
    parts = ", ".join(f"{name}={value!r}" for name, value in _changed(settings).items())
    return f"{type(settings).__name__}({parts})"


@with_field_docs
@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters with a learning rate or weight decay of their own."""

    pattern: str
    """Shell-style pattern of parameter names, such as `model.embed_tokens.*` or `*.mlp.*`."""
    lr_factor: float = 1.0
    """Their learning rate is `optimizer.lr` times this."""
    weight_decay: float | None = None
    """Their decay, norms and biases included; None decays as `optimizer.weight_decay` says."""

    __repr__ = _short

    def __post_init__(self) -> None:
        check_types(self, "optimizer.groups.")
        at_least("optimizer.groups.lr_factor", self.lr_factor, 0, float)
        if self.weight_decay is not None:
            at_least("optimizer.groups.weight_decay", self.weight_decay, 0, float)


@with_field_docs
@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW as torch.optim.AdamW defines it, and its learning-rate schedule."""

    lr: float = 1e-5
    """Learning rate: the factor on AdamW's normalised step, at its highest."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay factors a step of exp_avg and exp_avg_sq."""
    eps: float = 1e-8
    """Added to the square root of exp_avg_sq, in units of the gradient."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices and embeddings; norms and biases are not decayed."""
    groups: tuple[ParameterGroup, ...] = ()
    """Parameters that differ; a name that several patterns match belongs to the first of them."""
    freeze: tuple[str, ...] = ()
    """Shell-style patterns of units that are not trained: `embed`, `layers.<i>`, `head`. They have no
    gradients and no moments, and backward ends at the first unit that is trained. Tied embeddings are
    frozen with `embed`; `head` is the final norm then."""
    clip_norm: float | None = 1.0
    """Limit of the global gradient norm; None turns clipping off."""
    warmup_steps: int = 0
    """Steps over which the rate rises linearly from 0."""
    lr_schedule: str = "constant"
    """After the warm-up: `constant`, `linear` / `cosine` decay to 0 at the last step, or `wsd`: stable
    until the last `decay_steps`, then linear decay to 0."""
    decay_steps: int | None = None
    """Steps of the decay of `wsd`; None takes a tenth of the run's steps."""

    __repr__ = _short

    def __post_init__(self) -> None:
        check_types(self, "optimizer.")
        at_least("optimizer.lr", self.lr, 0, float)
        at_least("optimizer.eps", self.eps, 0, float)
        at_least("optimizer.weight_decay", self.weight_decay, 0, float)
        at_least("optimizer.warmup_steps", self.warmup_steps, 0)
        choice("optimizer.lr_schedule", self.lr_schedule, LR_SCHEDULES)
        if self.decay_steps is not None:
            at_least("optimizer.decay_steps", self.decay_steps, 1)
            if self.lr_schedule != "wsd":
                raise ConfigError(
                    f"optimizer.decay_steps={self.decay_steps} with lr_schedule={self.lr_schedule!r}, which "
                    "decays over all steps or none: leave it out, or set lr_schedule='wsd'"
                )
        if not all(isinstance(pattern, str) for pattern in self.freeze):
            raise ConfigError(f"optimizer.freeze={self.freeze!r}: expected patterns such as ('layers.0',)")
        numbers = all(isinstance(beta, int | float) for beta in self.betas)
        if len(self.betas) != 2 or not numbers or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"optimizer.betas={self.betas!r}: expected two numbers in [0, 1)")
        if self.clip_norm is not None and not 0 < self.clip_norm < math.inf:
            raise ConfigError(
                f"optimizer.clip_norm={self.clip_norm!r}: expected a finite number above 0, or None"
            )

    def lr_at(self, step: int, steps: int) -> float:
        """Learning rate of 0-based `step` in a run of `steps` (formulas of torch.optim.lr_scheduler)."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, steps - self.warmup_steps)
        if self.lr_schedule == "linear":
            return self.lr * (1 - progress)
        if self.lr_schedule == "cosine":
            return self.lr * (1 + math.cos(math.pi * progress)) / 2
        if self.lr_schedule == "wsd":
            return self.lr * min(1.0, (steps - step) / (self.decay_steps or max(1, steps // 10)))
        return self.lr


@with_field_docs
@dataclass(frozen=True, kw_only=True)
class Data:
    """Where training text comes from, and how it becomes sequences."""

    path: str
    """A file of text, `.jsonl` or `.parquet`; a folder of such files; a folder that `datasets` saved, or a
    data set's hub id; or a folder of prepared samples (`input_ids.npy` and `labels.npy`, int32 [samples,
    sequence_length], label -100 is no target; `position_ids.npy`, 0 where a document starts, if
    documents must not see each other)."""
    column: str | None = None
    """Column of text, or of messages, which make a chat. None takes what is there: `messages` or
    `conversations`, `prompt` and `completion`, or `text`. Of a chat the assistant's turns are targets, of
    a prompt with its completion the completion is."""
    tokenizer: str | None = None
    """Folder or hub id of the tokenizer; None takes the model's own."""
    suffixes: tuple[str, ...] = (".txt", ".md", ".py", ".jsonl", ".parquet")
    """File endings that are read from a folder."""
    packing: str | None = None
    """`wrapped`: documents are joined and cut into sequences, and a token may see the documents before
    its own. `bounded`: whole documents share a sequence, each with positions of its own and no attention
    to the others. `padded`: one document a sequence, the rest is no target. None takes `wrapped` where
    all is text, else `bounded`."""
    over_long: str = "refuse"
    """Of a chat or completion longer than a sequence, unless `wrapped`: `refuse` the run, `cut` its end
    off or `drop` it. Long text goes on in further sequences."""
    subset: str | None = None
    """Configuration of a data set that has several."""
    split: str = "train"
    """Split of a data set."""
    eval_path: str | None = None
    """Held-out data of any kind that `path` can be, read in the same way."""
    eval_split: str = "validation"
    """Split of `eval_path` if that is a data set."""
    eval_fraction: float = 0.0
    """Part of the sequences of `path` that is held out, drawn by the seed, if there is no `eval_path`."""

    __repr__ = _short

    def __post_init__(self) -> None:
        check_types(self, "data.")
        if not self.path:
            raise ConfigError("data.path='': empty: give a text file, or a folder")
        if not self.suffixes or not all(isinstance(s, str) and s.startswith(".") for s in self.suffixes):
            raise ConfigError(f"data.suffixes={self.suffixes!r}: expected file endings such as ('.txt',)")
        if self.packing is not None:
            choice("data.packing", self.packing, PACKINGS)
        choice("data.over_long", self.over_long, OVER_LONG)
        if not 0 <= self.eval_fraction < 1:
            raise ConfigError(f"data.eval_fraction={self.eval_fraction!r}: expected a number in [0, 1)")
        if self.eval_fraction and self.eval_path is not None:
            raise ConfigError("data.eval_fraction and data.eval_path name two held-out sets: set only one")


@with_field_docs
@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When to save the training state: 12 bytes per parameter on disk, in the run folder."""

    every_steps: int | None = None
    """Save after each multiple of so many steps; None saves by no step."""
    every_minutes: float | None = None
    """Save when so many minutes have passed since the last save; None saves by no time."""
    keep_last: int = 2
    """Checkpoints that stay; older ones go when a new one is whole on disk."""
    on_stop: bool = True
    """Save when `stop()` or Ctrl-C ends the run before its last step."""

    __repr__ = _short

    def __post_init__(self) -> None:
        check_types(self, "checkpoint.")
        if self.every_steps is not None:
            at_least("checkpoint.every_steps", self.every_steps, 1)
        if self.every_minutes is not None:
            at_least("checkpoint.every_minutes", self.every_minutes, 0, float)
        at_least("checkpoint.keep_last", self.keep_last, 1)


@with_field_docs
@dataclass(frozen=True, kw_only=True)
class Config:
    """One fine-tuning run."""

    model: str | PretrainedConfig
    """Folder or hub id of a Hugging Face causal language model; or a transformers config, which
    starts from random weights."""
    data: Data
    """What it is trained on, and measured on."""
    sequence_length: int = 1024
    """Tokens of a sequence."""
    max_position_embeddings: int | None = None
    """Positions that the model may have, in place of its own number, which longer sequences than it was
    trained with are refused by. Rotary positions go on beyond it as the model's `rope_parameters` say. An
    exported model has this number."""
    batch_size: int = 8
    """Sequences of one step over all ranks; must be a multiple of `ranks` times `gradient_accumulation`."""
    gradient_accumulation: int = 1
    """Passes that a step's batch is split into, each a forward and a backward. Their gradients are added up
    in FP32 (4 bytes of host memory per parameter), and one update follows, of the mean over all targets."""
    steps: int = 100
    """Optimizer steps; the learning-rate schedule ends with the last one."""
    eval_every: int = 100
    """Steps between two evaluations on the held-out data, if there is any (`data.eval_path` or
    `data.eval_fraction`); the first is before the first step, the last after the last."""
    optimizer: Optimizer = field(default_factory=Optimizer)
    """AdamW's settings, clipping, and the learning-rate schedule."""
    layout: Layout = field(default_factory=Layout)
    """How a step is carried out. `"auto"` stands for the default layout with `tune=True`."""
    tune: bool = False
    """Let the policy choose the layout: it measures the machine, predicts every layout, tries the best
    few on the run's own first steps (all compute the same result) and keeps the fastest."""
    retune: bool = False
    """After `tune`: when steps drift from what they took then (another process uses the host, sequences
    change), take a layout that is better now. Without it, such a layout is only proposed."""
    router_aux_loss_coef: float | None = None
    """Factor of the load-balancing loss of a mixture of experts, as transformers defines it, over the batch
    of all ranks. None takes the model's own `router_aux_loss_coef` if its config.json sets
    `output_router_logits`, else 0."""
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    """When the training state goes to disk."""
    ranks: int | None = None
    """Data-parallel processes; None takes every GPU, or 2 on a machine without one."""
    device: str | None = None
    """`cuda` or `cpu`; None takes CUDA where there is a GPU."""
    compute_dtype: str | None = None
    """`bfloat16` or `float32`; None takes bfloat16 on CUDA and float32 on CPU."""
    reduce_dtype: str | None = None
    """`bfloat16` or `float32`: what gradients are summed over the ranks and kept in until the update; None
    takes `compute_dtype`. float32 costs twice the bytes of landing, gradient buffers and links."""
    compile: bool | None = None
    """Compile the layer template with torch.compile; None compiles on CUDA."""
    random_weights: bool = False
    """Start from random weights even if `model` is a folder that has some."""
    seed: int = 0
    """Seeds the order of the samples and random weights."""
    run_folder: str | None = None
    """Where the run writes its metrics; None makes `runs/<date>-<time>`."""
    host_memory_budget: float | None = None
    """GiB of host memory the run may take; None asks the operating system and its cgroup."""
    gpu_memory_budget: float | None = None
    """GiB of its GPU's memory that each rank may allocate (a CUDA context takes about 0.5 GiB more); None
    takes what is free. On a CPU it limits what would be on the GPU."""

    def __post_init__(self) -> None:
        if self.layout == AUTO:
            object.__setattr__(self, "layout", Layout())
            object.__setattr__(self, "tune", True)
        check_types(self, "")
        for name in ("sequence_length", "batch_size", "gradient_accumulation", "steps", "eval_every"):
            at_least(name, getattr(self, name), 1)
        if self.max_position_embeddings is not None:
            at_least("max_position_embeddings", self.max_position_embeddings, 1)
        at_least("seed", self.seed, 0)
        if self.seed >= 2**63:
            raise ConfigError(f"seed={self.seed!r}: expected an integer below 2**63")
        if self.ranks is not None:
            at_least("ranks", self.ranks, 1)
        if self.router_aux_loss_coef is not None:
            at_least("router_aux_loss_coef", self.router_aux_loss_coef, 0, float)
        if self.device is not None:
            choice("device", self.device, ("cuda", "cpu"))
        for name in ("compute_dtype", "reduce_dtype"):
            if getattr(self, name) is not None:
                choice(name, getattr(self, name), tuple(DTYPES))
        if self.host_memory_budget is not None:
            at_least("host_memory_budget", self.host_memory_budget, 0, float)
        if self.gpu_memory_budget is not None:
            at_least("gpu_memory_budget", self.gpu_memory_budget, 0, float)
        if self.layout.schedule == "in_backward" and self.optimizer.clip_norm is not None:
            raise ConfigError(
                "layout.schedule='in_backward' cannot clip, since a unit updates before the global "
                "norm is known: set optimizer.clip_norm=None, or layout.schedule='in_forward'"
            )

        if self.gradient_accumulation > 1 and self.layout.gpu_updates:
            raise ConfigError(
                f"layout.gpu_updates={self.layout.gpu_updates} with gradient_accumulation="
                f"{self.gradient_accumulation}: gradients are added up in host memory: set gpu_updates=0"
            )

        if self.retune and not self.tune:
            raise ConfigError('retune=True with tune=False: nothing was tuned; set layout="auto" as well')

        if self.gradient_accumulation > 1 and self.tune:
            raise ConfigError(
                f"tune=True with gradient_accumulation={self.gradient_accumulation}: the policy knows steps "
                "of one pass only: set tune=False and give a layout"
            )

    def __repr__(self) -> str:
        parts = ", ".join(f"{name}={value}" for name, value in self._rows())
        return f"Config({parts})"

    def _repr_html_(self) -> str:
        return html_table("Config", self._rows())

    def _rows(self) -> list[tuple[str, str]]:
        """What differs from the defaults."""
        rows = {name: repr(value) for name, value in _changed(self).items()}
        if not isinstance(self.model, str):  # whose own representation is a page
            rows["model"] = f"<a new {self.model.model_type}>"
        return list(rows.items())

    @property
    def micro_batch_size(self) -> int:
        """Sequences of one pass over all ranks."""
        return self.batch_size // self.gradient_accumulation

    @property
    def gradient_dtype(self) -> torch.dtype:
        """`reduce_dtype` of a resolved config."""
        return DTYPES[str(self.reduce_dtype or self.compute_dtype)]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Config":
        """Builds a config from nested plain values, as a TOML file holds them."""
        return from_dict(cls, values, "")

    @classmethod
    def from_toml(cls, path: str | Path) -> "Config":
        """Reads a config from a TOML file."""
        try:
            values = tomllib.loads(Path(path).read_text())
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}: give a TOML file") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: not TOML: {error}") from error
        return cls.from_dict(values)

    def resolved(self) -> "Config":
        """This config with every None that stands for the machine's own choice filled in."""
        gpus = torch.cuda.device_count()
        device = self.device or ("cuda" if gpus else "cpu")
        if device == "cuda" and not gpus:
            raise ConfigError("device='cuda': no GPU is visible; set device='cpu'")
        ranks = self.ranks or (gpus if device == "cuda" else 2)
        if device == "cuda" and ranks > gpus:
            raise ConfigError(f"ranks={ranks}: {gpus} GPU(s) are visible; set ranks to at most {gpus}")
        parts = ranks * self.gradient_accumulation
        if self.batch_size % parts:
            passes = f" and {self.gradient_accumulation} passes" if self.gradient_accumulation > 1 else ""
            raise ConfigError(
                f"batch_size={self.batch_size} cannot be split over {ranks} ranks{passes}: use a multiple of "
                f"{parts}"
            )
        return dataclasses.replace(
            self,
            device=device,
            ranks=ranks,
            compute_dtype=self.compute_dtype or ("bfloat16" if device == "cuda" else "float32"),
            compile=(device == "cuda") if self.compile is None else self.compile,
        )
