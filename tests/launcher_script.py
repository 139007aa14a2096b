"""Run by test_examples.py: launcher_script.py notebook|debug DIRECTORY. A notebook's cell would hold the same."""

import sys
from pathlib import Path


def train(directory):
    import torch
    from accelerate import Accelerator

    from hf_edgc import EDGCConfig, EDGCPlugin

    assert not torch.cuda.is_initialized()
    plugin = EDGCPlugin(EDGCConfig(mode="static", rank=2, min_compression_ratio=1.0))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[plugin])
    model = torch.nn.Linear(64, 64)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        accelerator.backward(model(torch.randn(2, 64)).square().sum())
        optimizer.step()
    ratio = plugin.state.totals.compression_ratio
    Path(directory, str(accelerator.process_index)).write_text(f"{accelerator.num_processes} {ratio}")
    del model, optimizer
    accelerator.free_memory()


if __name__ == "__main__":
    import accelerate
    import torch

    import hf_edgc  # what a notebook imports first must not touch CUDA, or its launcher could not fork
    from hf_edgc import EDGCCallback, EDGCPlugin  # noqa: F401

    assert hf_edgc.__version__ and not torch.cuda.is_initialized()
    launcher = getattr(accelerate, f"{sys.argv[1]}_launcher")
    launcher(train, (sys.argv[2],), num_processes=2)
