"""Settings that must be there before torch is first imported."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a process per core runs tests
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
os.environ.setdefault("MPLBACKEND", "agg")
