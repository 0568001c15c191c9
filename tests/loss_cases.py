"""Losses with every term."""

ALL = {
    "start_pref_v": 0.5,
    "limit_pref_v": 2,
    "start_pref_ae": 3,
    "limit_pref_ae": 1,
    "start_pref_pf": 7,
    "limit_pref_pf": 2,
    "start_pref_h": 4,
    "limit_pref_h": 3,
}


WITHOUT_HUBER = {
    name: value for name, value in ALL.items() if name[-2:] not in ("_h", "pf")
}
LOSSES = {
    "mse": ALL,
    "mae": {**ALL, "loss_func": "mae"},
    "norm": {**ALL, "loss_func": "mae", "f_use_norm": True},
    "huber": {**WITHOUT_HUBER, "use_huber": True},
    "intensive": {**ALL, "intensive_ener_virial": True, "use_default_pf": True},
    "relative": {**ALL, "relative_f": 0.3},
}
