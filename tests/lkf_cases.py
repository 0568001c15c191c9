"""Losses of the Kalman filter."""

KINDS = {
    "AdaMuon": {"type": "AdaMuon"},
    "HybridMuon": {"type": "HybridMuon"},
    "SOAP": {"type": "SOAP"},
    "LKF": {"type": "LKF", "kf_blocksize": 64, "kf_start_pref_f": 2.0},
}
OPTIONS = NO_VIRIAL = {"loss__start_pref_v": 0, "loss__limit_pref_v": 0}
