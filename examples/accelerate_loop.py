"""A plain Accelerate loop with EDGC; the lines that EDGC adds are marked.

accelerate launch --config_file accelerate_configs/cpu_2proc.yaml examples/accelerate_loop.py --output_dir out
Run it again with --resume to go on from the last state.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import GPT2Config, GPT2LMHeadModel

from hf_edgc import EDGCConfig, EDGCPlugin  # EDGC

SPECIAL = {"bos_token_id": 0, "eos_token_id": 0}


def main(output_dir: Path, steps: int, accumulation: int, resume: bool) -> None:
    """Train a small GPT-2 on counting sequences for ``steps`` optimizer steps, saving half-way."""
    plugin = EDGCPlugin(EDGCConfig(max_rank=8), total_steps=steps)  # EDGC
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        gradient_accumulation_steps=accumulation,
        kwargs_handlers=[plugin],  # EDGC
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=128, n_head=4, vocab_size=512, n_positions=64, **SPECIAL))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = (torch.arange(512)[:, None] * 7 + torch.arange(32)) % 512
    loader = torch.utils.data.DataLoader(tokens, batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step, state_dir = 0, output_dir / "state"
    if resume:
        accelerator.load_state(str(state_dir))
        step = steps // 2
    while step < steps:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    step += 1
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients and step == steps // 2:
                accelerator.save_state(str(state_dir))
            if step == steps:
                break
    if plugin.states:
        totals = plugin.state.totals
        accelerator.print(
            f"loss {loss.item():.3f} after {totals.steps} steps; sent {totals.sent_bytes / 1e6:.1f} MB instead of "
            f"{totals.dense_bytes / 1e6:.1f} MB ({totals.compression_ratio:.1f} x less)"
        )
    del model, optimizer
    accelerator.free_memory()
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/accelerate_loop"))
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps")
    parser.add_argument("--accumulation", type=int, default=2, help="micro-batches a step")
    parser.add_argument("--resume", action="store_true", help="go on from the saved state")
    main(**vars(parser.parse_args()))
