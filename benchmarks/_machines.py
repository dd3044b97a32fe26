"""A simulated machine and workload: a search strategy is scored on it against a truth that is known.

Built from mechanisms: processes that share cores and hand batches over in time (``_machines_queue``), kernels in waves
over multiprocessors and a walk over the layers for memory (``_machines_device``). It shares neither code nor formulas
with the tuner's own models, which must not be scored on their own assumptions.

How a workload is drawn from its seed: the family uniformly of cnn, vit, gpt, unet, tabular, audio; its size small,
medium, large or huge with 0.3, 0.35, 0.25, 0.1; one of nine cards from 8 to 80 GB, figures up to a tenth off; 2 to 64
cores by the class of the card, 60 % of them with two threads a core; decoding log-uniform over two to three orders of
magnitude within a family, lognormal between samples, half of the sets waiting for storage too; 20,000 to 1,300,000
samples; 30 % of loops wait for the device in each step. Channels-last gains or loses per layer so that over the
convolutional networks about one in seven gets slower, some by half, as timm's published tables have it. For one
workload in twenty fake tensors fail, as they do for models whose shapes depend on data.

Measured figures differ from the truth by the offset of a process (0.6 %), a drift of the machine (a random walk),
jitter that lasts over steps (AR(1), 2 %) and slow steps (3 % of them), more where cores are contended. Plans that take
turns share the drift of their group, and each of their processes is off by what was measured on real ones: mostly 2 %,
one in ten 7 %. Where they do not fit the card together, whole processes run one after the other, as in the product.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks._machines_device import GIB
from benchmarks._machines_truth import MachineTruth, Truth, read_arm
from fulltilt.levers import Facts, default_plan
from fulltilt.records import IN_TURNS, Measurement, Plan, Status, Trial
from fulltilt.stats import Turns
from fulltilt.tuner.picks.finalists import MEMORY_SAFETY_PCT
from fulltilt.tuner.question.space import Space
from fulltilt.tuner.trials.rows import build_row, build_turns_row

BATCH_SIZES = tuple(2**i for i in range(14))
NUM_WORKERS = (0, 2, 4, 8, 12, 16)
N_BLOCKS, STEPS_PER_BLOCK = 5, 8
START_S = 2.5  # of a trial: fork, context, first kernels
LIVE_START_S = (0.5, 1.0)  # of a process that takes turns, and its
TURNS_S = 0.4  # of blocks, at least one step in each of
N_TURNS = 4
N_UNTIMED = 18  # steps: of the warm-up and after each switch
PROCESS_LOG, ODD_PROCESS_LOG, ODD_SHARE = 0.02, 0.07, 0.1  # research/alternation.md: most pairs within 4 %, a few 10
FURTHER_LEVERS = ("compile", "channels_last", "activation_checkpointing")


class SimulatedMachine(MachineTruth):
    """One workload on one machine, drawn from a seed: a target for a search, and the truth to score it with."""

    def __init__(self, seed: int):
        rng = np.random.default_rng([seed, 1])
        super().__init__(seed, rng)
        self._user = self._draw_user_plan(rng)
        self._fake_log = rng.normal(0, 0.025)
        self._fake_arm_log = rng.normal(0, 0.01, 16)
        self.fake_tensors_fail = bool(rng.random() < 0.05)
        self.memory_gib = self.gpu.memory_gib  # of the card, as its driver states it; the limit of a search
        self.recommendable_gib = self.memory_gib * MEMORY_SAFETY_PCT / 100
        self.restart_noise("")
        self.facts = self._build_facts()

    def restart_noise(self, name: str) -> None:
        """Begin another day on the same machine: noise drawn from its seed and this name."""
        self._noise = np.random.default_rng([self.seed, 2, *name.encode()])
        self._drift_log = self.now_s = 0.0

    def space(self, n_points: int) -> Space:
        """Span the guide's grid of 336 points, or with three further switches 2,688.

        Channels-last has no values where the model has no 2-d convolution, so the larger grid is 1,344 there.
        """
        axes: dict[str, tuple[Any, ...]] = {
            "batch_size": BATCH_SIZES,
            "num_workers": NUM_WORKERS,
            "precision": ("fp32", self.gpu.low),
            "pin_memory": (False, True),
        }
        if n_points == 2688:
            axes |= dict.fromkeys(FURTHER_LEVERS, (False, True))
            if not self.model.has_conv:
                del axes["channels_last"]
        return Space(
            axes=axes, base=self._user, user_plan=self._user, facts=self.facts, memory_gib=self.recommendable_gib
        )

    def __call__(self, plan: Plan, *, id: str, why: str, kind: str = "end_to_end") -> Trial:
        def build(status: Status, reason: str | None = None, measured: Measurement | None = None) -> Trial:
            self.now_s += seconds
            return build_row(
                plan, id=id, why=why, kind=kind, status=status, reason=reason, measurement=measured, seconds=seconds
            )

        if kind == "memory":
            if self.fake_tensors_fail:
                seconds = 1.0
                return build("error", "DataDependentOutputException: a shape depends on the data (simulated)")
            seconds = 1.5
            return build("ok", measured=_build_partial(memory_allocated_peak_gib=self._estimate_peak_gib(plan)))
        needed_gib = self.compute_needed_gib(plan, with_loader=kind != "device")
        seconds = START_S + self.estimate_compile_s(plan, kind)
        if kind != "loader" and needed_gib > self.usable_gib:
            had = f"{needed_gib:.2f} GiB needed, {self.usable_gib:.2f} GiB usable (simulated)"
            return build("out_of_memory", f"CUDA out of memory: {had}")
        truth = self.find_truths([plan], kind=kind)[0]
        blocks = self._draw_blocks(truth) * plan["batch_size"] / truth.step_s
        measured = self._build_measurement(plan, kind, blocks)
        seconds += truth.step_s * (N_BLOCKS + 2) * STEPS_PER_BLOCK
        return build("ok", measured=measured)

    def run_group(self, plans: Mapping[str, Plan], *, why: str) -> list[Trial]:
        """Have a process of each plan take turns; where the card does not hold them all, run one after the other."""
        if sum(map(self.compute_needed_gib, plans.values())) > self.usable_gib:
            rows = [self(plan, id=id, why=why) for id, plan in plans.items()]
            failed = [dataclasses.replace(row, kind=IN_TURNS) for row in rows if row.status != "ok"]
            return failed or [
                build_turns_row(
                    row.plan, Turns(samples_per_s=row.samples_per_s or 0.0, stalled_pct=0.0), id=row.id, why=why,
                    seconds=row.seconds,
                )
                for row in rows
            ]  # fmt: skip
        self._walk()
        truths = self.find_truths(list(plans.values()))
        return [self._take_turns(plan, truth, id, why) for (id, plan), truth in zip(plans.items(), truths, strict=True)]

    def _take_turns(self, plan: Plan, truth: Truth, id: str, why: str) -> Trial:
        rng, blocks_s = self._noise, max(TURNS_S, N_TURNS * truth.step_s)
        process_log = rng.normal(0, ODD_PROCESS_LOG if rng.random() < ODD_SHARE else PROCESS_LOG)
        jitter_log = rng.normal(0, 2 * self._find_jitter(truth) / np.sqrt(blocks_s / truth.step_s))
        rate = plan["batch_size"] / truth.step_s * np.exp(self._drift_log + process_log + jitter_log)
        seconds = rng.uniform(*LIVE_START_S) + self.estimate_compile_s(plan, IN_TURNS)
        seconds += N_UNTIMED * truth.step_s + blocks_s
        self.now_s += seconds
        return build_turns_row(
            plan, Turns(samples_per_s=float(rate), stalled_pct=0.0), id=id, why=why, seconds=float(seconds)
        )

    def _walk(self) -> None:
        """Let the machine drift."""
        self._drift_log = 0.97 * self._drift_log + self._noise.normal(0, 0.002)

    def _find_jitter(self, truth: Truth) -> float:
        return 0.02 * self._find_contention(truth)

    def _find_contention(self, truth: Truth) -> float:
        return 1 + 1.5 * (truth.wanted_cores > self.host.n_cores)

    def _estimate_peak_gib(self, plan: Plan) -> float:
        """Estimate the peak as fake tensors would, off by a bias of the machine and one of the levers."""
        arm = read_arm(plan)
        ideal = self.find_footprint(plan).ideal_bytes
        number = 8 * arm.is_low + 4 * arm.channels_last + 2 * arm.compile + arm.activation_checkpointing
        bias = np.exp(self._fake_log + self._fake_arm_log[number])
        return float((ideal + self.compute_input_bytes(plan, False)) / GIB * bias)

    def _draw_blocks(self, truth: Truth) -> np.ndarray:
        """Draw the factors of the blocks of one trial, around 1."""
        rng, contention = self._noise, self._find_contention(truth)
        self._walk()
        n = N_BLOCKS * STEPS_PER_BLOCK
        jitter, at = np.empty(n), 0.0
        for i, shock in enumerate(rng.normal(0, self._find_jitter(truth) * np.sqrt(1 - 0.6**2), n)):
            at = 0.6 * at + shock
            jitter[i] = at
        slow = np.where(rng.random(n) < 0.03, rng.uniform(1.1, 1.6, n), 1.0)
        level = np.exp(self._drift_log + rng.normal(0, 0.006 * contention))
        steps = (level * np.exp(jitter) * slow).reshape(N_BLOCKS, STEPS_PER_BLOCK)
        return 1 / steps.mean(axis=1)

    def _build_measurement(self, plan: Plan, kind: str, blocks: np.ndarray) -> Measurement:
        rate = float(len(blocks) / (1 / blocks).sum())
        half = 2.776 * float(blocks.std(ddof=1)) / np.sqrt(len(blocks))
        figures: dict[str, Any] = {}
        if kind != "loader":
            footprint = self.find_footprint(plan)
            extra = self.compute_input_bytes(plan, kind != "device")
            held_gib = self.compute_reserved_gib(plan, with_loader=kind != "device")
            figures["memory_allocated_peak_gib"] = (footprint.allocated_bytes + extra) / GIB
            figures["memory_reserved_peak_gib"] = min(held_gib, self.usable_gib)
            figures["first_step_s"] = 0.5 + self.estimate_compile_s(plan, kind)
        elif plan["num_workers"]:
            own_s = 1e-4 / self.host.speed if plan["pin_memory"] else self.compute_receive_s(plan["batch_size"])
            figures["receive_ms"] = float(1e3 * own_s * np.exp(self._noise.normal(0, 0.08)))
        return dataclasses.replace(
            _build_partial(**figures),
            samples_per_s=rate,
            samples_per_s_ci95=(rate - half, rate + half),
            block_samples_per_s=tuple(float(value) for value in blocks),
            n_steps=N_BLOCKS * STEPS_PER_BLOCK,
            n_warmup_steps=2 * STEPS_PER_BLOCK,
        )

    def _draw_user_plan(self, rng: np.random.Generator) -> Plan:
        """Draw what people start from: a batch of 16 to 64, few workers, fp32; smaller where that does not fit."""
        values = {
            "num_workers": int(rng.choice([0, 2, 4], p=[0.4, 0.3, 0.3])),
            "precision": "fp32",
            "pin_memory": bool(rng.random() < 0.5),
        }
        batch = int(rng.choice([16, 32, 64]))
        while batch > 1 and not self.fits(default_plan({**values, "batch_size": batch})):
            batch //= 2
        return default_plan({**values, "batch_size": batch})

    def _build_facts(self) -> Facts:
        return Facts(
            device_type="cuda", compute_capability=self.gpu.capability, n_cores_usable=self.host.n_cores,
            has_c_compiler=True, has_conv=self.model.has_conv, has_any_conv=self.model.has_conv,
            n_checkpointable=self.model.n_blocks, optimizer="AdamW", n_samples=self.data.n_samples, is_iterable=False,
            has_native_bf16=self.gpu.low == "bf16",
        )  # fmt: skip


def draw_machines(seeds: Iterable[int]) -> Iterator[SimulatedMachine]:
    """Draw one machine a seed; seeds where no plan of the small grid fits are left out."""
    for machine in map(SimulatedMachine, seeds):
        if any(map(machine.fits, machine.space(336).grid())):
            yield machine


def _build_partial(**figures: Any) -> Measurement:
    return Measurement(
        phases_ms=None, samples_per_s=None, samples_per_s_ci95=None, block_samples_per_s=(), n_steps=0,
        n_warmup_steps=0, null_reasons={"phases_ms": "the simulator times whole steps only"}, **figures,
    )  # fmt: skip
