"""Statistics of data for a new model: sums of descriptor and conditions, energies of elements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from deepmd_ema.config.labels import APARAM, ATOM_ENERGY, ENERGY, FPARAM, LABELS
from deepmd_ema.model.interface import label_weight, sum_by_type
from deepmd_ema.model.output_bias import BiasFit, FrameEnergies, set_bias

if TYPE_CHECKING:
    from deepmd_ema.batch import Batch
    from deepmd_ema.config.schema.model import Link, ModelConfig
    from deepmd_ema.model.energy import EnergyModel

# F frames, A atoms, T types, P frame parameters, Q atom parameters
Array: TypeAlias = np.ndarray


@dataclass(frozen=True, eq=False)
class Statistics:
    """Sums over the data, from which means, spreads and biases follow.

    Attributes:
        type_map: T names of elements.
        measured: sums that the descriptor has measured, by name.
        conditions: sums of the frame parameters ``fparam`` (P, 3) and the atom parameters
            ``aparam`` (Q, 3), if there are any; a row is (count, sum, sum of squares).
        fit: energy of each element.
        observed: elements that the data hold, sorted by name.
        protect: smallest spread of frame and atom parameters.
        content: digest of the data; empty if it is unknown.
    """

    type_map: tuple[str, ...]
    measured: dict[str, Array]
    conditions: dict[str, Array]
    fit: BiasFit
    observed: tuple[str, ...] = ()
    protect: float = 0.01
    content: str = ""

    def lines(self) -> list[str]:
        """Return lines about the fit of the energies."""
        # the fit of a quantity of several numbers is not shown
        if self.fit.bias.ndim > 1:
            return []
        shown = [t for t, name in enumerate(self.type_map) if name in self.observed]
        out = [
            "energy of each element: "
            + ", ".join(f"{self.type_map[t]} {self.fit.bias[t]:.6g} eV" for t in shown)
        ]
        if self.fit.rmse_per_atom is not None:
            out.append(
                f"residual of the energy fit: {1000 * self.fit.rmse_per_atom:.4g} meV/atom (RMSE)"
            )
        if self.fit.undetermined:
            names = ", ".join(self.fit.undetermined)
            out.append(
                f"the energies of {names} cannot be determined separately from these compositions; "
                "equal values are used"
            )
        return out


def collect_statistics(
    model: EnergyModel, config: ModelConfig, batches: Iterable[Batch]
) -> Statistics:
    """Return the statistics of all frames in ``batches``, in one pass.

    Args:
        model: on the CPU; nothing in it changes.
        config: its section ``model``.
        batches: on the CPU, in the layout of the model.
    """
    num_types = len(config.type_map)
    fitting = config.fitting_net
    num_atoms = np.zeros(num_types)
    energies = FrameEnergies(config)
    atom_label = ATOM_ENERGY if ENERGY in fitting.labels else fitting.labels[1]
    # number, sum and sum of squares for each type, from which a bias may follow without a fit
    atomic = np.zeros((num_types, 3, *LABELS[atom_label].shape))
    measured: dict[str, Array] = {}
    conditions: dict[str, Array] = {}
    threads = torch.get_num_threads()
    # while pairs are searched between these short operations, further threads would spin
    torch.set_num_threads(1)
    try:
        for batch in batches:
            # elements that no atom has are not `observed`
            num_atoms += batch.type_counts
            energies.add(batch)
            _accumulate(measured, model.descriptor.measure(batch))
            # (M, N): M frames or atoms, N numbers of the condition
            for name, number in (
                (FPARAM, fitting.numb_fparam),
                (APARAM, fitting.numb_aparam),
            ):
                if number and name in batch.conditions:
                    values = batch.conditions[name].numpy()
                    count = np.full(values.shape[1], float(len(values)))
                    sums = np.stack([count, values.sum(0), (values**2).sum(0)], 1)
                    _accumulate(conditions, {name: sums})
            if atom_label in batch.labels:
                value = batch.labels[atom_label]
                is_used = (label_weight(batch, atom_label) > 0).double()
                # 1 or 0 for each atom, in all components of its label
                has_label = is_used[batch.atom_frame].view(-1, *[1] * (value.dim() - 1))
                # only atoms of frames with the label and a weight count
                parts = (
                    has_label.expand_as(value),
                    has_label * value,
                    has_label * value**2,
                )
                atomic += sum_by_type(torch.stack(parts, 1), batch)
    finally:
        torch.set_num_threads(threads)
    return Statistics(
        type_map=tuple(config.type_map),
        measured=measured,
        conditions=conditions,
        fit=set_bias(energies, atomic),
        observed=tuple(
            sorted(name for name, count in zip(config.type_map, num_atoms) if count)
        ),
        protect=config.data_stat_protect,
    )


def shared_statistics(
    by_task: Mapping[str, Statistics],
    links: Iterable[Link],
    shares: Mapping[str, float],
) -> dict[str, Statistics]:
    """Return the statistics of tasks with one set of sums for what their models share.

    The data of each task count by its share.

    Args:
        by_task: those of the data of each task.
        links: what is shared.
        shares: probability of each task to be trained by a step.
    """
    # links of each part that is shared as a whole: an embedding of elements has no statistics
    groups: dict[str, list[Link]] = {}
    for link in links:
        if link.level == 0 and link.part != "type_map":
            groups.setdefault(link.key, []).append(link)
    together = {
        task: replace(
            statistics,
            measured=dict(statistics.measured),
            conditions=dict(statistics.conditions),
        )
        for task, statistics in by_task.items()
    }
    for group in groups.values():
        # weights relative to the largest share: sums of the task with it are not changed
        most = max(shares[link.task] for link in group)
        total: dict[str, Array] = {}
        # names of sums in a model with a hybrid descriptor have the number of the part before them
        prefixes = [
            f"{link.place[-1]}_" if isinstance(link.place[-1], int) else ""
            for link in group
        ]
        kind = "conditions" if group[0].part == "fitting_net" else "measured"
        for link, prefix in zip(group, prefixes):
            sums = getattr(by_task[link.task], kind)
            weight = shares[link.task] / most
            weighted = {
                name.removeprefix(prefix): weight * values
                for name, values in sums.items()
                if name.startswith(prefix)
            }
            _accumulate(total, weighted)
        for link, prefix in zip(group, prefixes):
            sums = getattr(together[link.task], kind)
            sums.update({prefix + name: values for name, values in total.items()})
    return together


def _accumulate(total: dict[str, Array], sums: Mapping[str, Array]) -> None:
    for name, values in sums.items():
        total[name] = total[name] + values if name in total else values
