"""The package's logger: shown by default, once, on the main process."""

import logging
import os

import torch.distributed as dist


def get_logger() -> logging.Logger:
    """Logger ``hf_edgc``; gets a stderr handler at level INFO unless the application has set it up."""
    logger = logging.getLogger("hf_edgc")
    if not logger.handlers and logger.level == logging.NOTSET:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[hf_edgc] %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return logger


def is_main_process() -> bool:
    """Whether this is worker 0; before the process group exists, by what the launcher says."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"
