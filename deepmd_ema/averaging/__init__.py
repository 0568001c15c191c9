"""Averages of the weights, updated during training, of the shards that this process holds.

``s <- d * s + (1 - d) * w`` (s: average, w: weight) is elementwise, so a process averages its
shards without communication. It is computed as ``s.lerp_(w, 1 - d)``, which leaves a weight that
does not move bit-identical.

Any trainer can use this package alone; it needs torch, the declarations of options, and the modules
of dp-ema for names and shards of weights::

    import torch
    from deepmd_ema.averaging import AverageBank, EmaProfile, PowerProfile, SwaProfile

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters())
    bank = AverageBank(
        # or several by task name, {"water": water, "ice": ice}; what they share has one average
        model,
        [
            EmaProfile("ema", 0.999),
            EmaProfile.from_half_life("slow", 2000, update_every=10, device="cpu"),
            PowerProfile.from_sigma_rel("p1", 0.10),
            SwaProfile("flat", start_step=50, dtype="float64"),
        ],
    )
    for step in range(100):
        loss = model(torch.randn(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # once after each optimizer step; update(ok) if only the device knows whether it was made
        bank.update()

    # the average is in the model; the live weights come back, also after an exception
    with bank.swapped_in("ema"):
        error = model(torch.randn(8, 4)).square().mean()

    torch.save({"model": model.state_dict(), "averages": bank.state_dict()}, "checkpoint.pt")
    saved = torch.load("checkpoint.pt", weights_only=True)
    model.load_state_dict(saved["model"])  # live weights first
    bank.load_state_dict(saved["averages"])  # counters and averages continue bitwise

    published = torch.nn.Linear(4, 1)
    bank.copy_to("p1", published)  # or bank.weights("p1"), a state dict

A bank can be pickled, also for a process that is spawned. ``bank.info(name)`` returns the decay,
updates and mean age.
"""

from deepmd_ema.averaging.bank import AverageBank
from deepmd_ema.config.schema.averaging import (
    EmaProfile,
    PowerProfile,
    SwaProfile,
    gamma_of,
    sigma_rel_of,
)
from deepmd_ema.config.schema.profile import Profile

__all__ = [
    "AverageBank",
    "EmaProfile",
    "PowerProfile",
    "Profile",
    "SwaProfile",
    "gamma_of",
    "sigma_rel_of",
]
