"""EDGCPlugin in a real Accelerator, on two gloo workers and on one process."""

import copy
import gc
import pickle
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from ddp_jobs import listening, same_everywhere, tiny_gpt2
from resume_jobs import reset_accelerate

from hf_edgc import EDGCConfig, EDGCPlugin

STATIC = EDGCConfig(mode="static", rank=2, min_compression_ratio=1.0)


def fresh_accelerator(**options):
    from accelerate import Accelerator

    reset_accelerate()
    return Accelerator(cpu=True, **options)


def loop(accelerator, model, optimizer, steps, accumulation=1):
    for micro_step in range(steps * accumulation):
        with accelerator.accumulate(model):
            generator = torch.Generator().manual_seed(31 * micro_step + dist.get_rank())
            tokens = torch.randint(64, (4, 32), generator=generator)
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def plain_loop(route, accumulation):
    plugin = EDGCPlugin(STATIC, bucket_cap_mb=1, total_steps=6)
    model = tiny_gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    handlers = [plugin] if route == "kwargs_handlers" else []
    accelerator = fresh_accelerator(kwargs_handlers=handlers, gradient_accumulation_steps=accumulation)
    if route == "attach":
        plugin.attach(accelerator)
    model, optimizer = accelerator.prepare(model, optimizer)
    if route == "attach after prepare":
        plugin.attach(accelerator, model)
    if route != "attach after prepare":
        assert "bucket_cap_mb" in plugin.to_kwargs()
    loop(accelerator, model, optimizer, 6, accumulation)
    totals = plugin.state.totals
    equal = all(same_everywhere(parameter.detach()) for parameter in model.parameters())
    rate = plugin.state.last.learning_rate
    del model, optimizer
    accelerator.free_memory()
    gc.collect()
    return totals.steps, totals.compression_ratio, equal, rate, len(plugin.states)


@pytest.mark.parametrize("route", ["kwargs_handlers", "attach", "attach after prepare"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_plain_loop_is_compressed(run_workers, route, accumulation):
    for steps, ratio, equal, rate, left in run_workers(plain_loop, route=route, accumulation=accumulation):
        assert steps == 6, "one synchronization for each optimizer step"
        assert ratio > 3 and equal
        assert rate == 1e-3, "read from the optimizer"
        assert left == 0, "a freed model takes its state along"


def two_models():
    plugin = EDGCPlugin(STATIC)
    accelerator = fresh_accelerator(kwargs_handlers=[plugin])
    first, second = accelerator.prepare(tiny_gpt2(), tiny_gpt2(n_embd=32))
    with pytest.raises(RuntimeError, match="exactly one attached model, there are 2"):
        _ = plugin.state
    optimizers = [accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1)) for model in (first, second)]
    loop(accelerator, first, optimizers[0], 2)
    again = accelerator.prepare(first)
    assert again is first and len(plugin.states) == 2
    return [plugin.state_of(model).totals.steps for model in (first, second, first.module)]


def test_each_model_has_its_own_state(run_workers):
    assert run_workers(two_models) == [[2, 0, 2]] * 2


def unwrapped_and_freed(directory):
    """Prepared again after unwrapping; a freed model's number is free again; files go by number."""
    plugin = EDGCPlugin(STATIC)
    accelerator = fresh_accelerator(kwargs_handlers=[plugin])
    first, second = accelerator.prepare(tiny_gpt2(), tiny_gpt2(n_embd=32))
    optimizer = accelerator.prepare(torch.optim.SGD(second.parameters(), lr=0.1))
    loop(accelerator, second, optimizer, 2)
    bare = accelerator.unwrap_model(first)
    del first
    accelerator._models = [second]
    gc.collect()
    assert len(plugin.states) == 1
    accelerator.save_state(directory)
    first = accelerator.prepare(bare)
    loop(accelerator, first, accelerator.prepare(torch.optim.SGD(first.parameters(), lr=0.1)), 1)
    numbers = [attached.number for attached in plugin._attached.values()]
    steps = [state.totals.steps for state in plugin.states]
    from hf_edgc.checkpoint import load_state

    restored = load_state(plugin.state_of(second), directory, 1)
    return numbers, steps, restored


def test_unwrap_and_prepare_again(run_workers, tmp_path):
    assert run_workers(unwrapped_and_freed, directory=str(tmp_path)) == [([1, 0], [2, 1], True)] * 2
    assert (tmp_path / "edgc_1_shared.safetensors").exists()


def uneven():
    """Worker 1 has four batches more; then both go on together."""
    from torch.distributed.algorithms.join import Join

    plugin = EDGCPlugin(STATIC)
    accelerator = fresh_accelerator(kwargs_handlers=[plugin])
    model = accelerator.prepare(tiny_gpt2())
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    with Join([model]):
        loop(accelerator, model, optimizer, 3 + 4 * dist.get_rank())
    loop(accelerator, model, optimizer, 2)
    return plugin.state.totals.steps, all(same_everywhere(p.detach()) for p in model.parameters())


def test_uneven_inputs_under_join_are_no_difference(run_workers):
    assert run_workers(uneven) == [(9, True)] * 2


def gan(quiet):
    """A generator's step runs backward through the discriminator and discards that gradient."""
    import contextlib

    plugin = EDGCPlugin(EDGCConfig(mode="static", rank=1, min_compression_ratio=1.0))
    accelerator = fresh_accelerator(kwargs_handlers=[plugin])
    models = accelerator.prepare(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
    optimizers = [accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.01)) for model in models]
    (generator, discriminator), (of_generator, of_discriminator) = models, optimizers
    with listening() as told:
        for step in range(5):
            noise = torch.randn(4, 32, generator=torch.Generator().manual_seed(step + 100 * dist.get_rank()))
            accelerator.backward(discriminator(generator(noise).detach()).square().sum())
            of_discriminator.step()
            of_discriminator.zero_grad()
            with accelerator.no_sync(discriminator) if quiet else contextlib.nullcontext():
                accelerator.backward(-discriminator(generator(noise)).square().sum())
            of_generator.step()
            of_generator.zero_grad()
            of_discriminator.zero_grad()
    return plugin.state_of(discriminator).totals.steps, [line for line in told if "several times" in line]


@pytest.mark.fault("a synchronized gradient is discarded (a GAN's generator step)", "one warning that says what to do")
def test_a_gans_discarded_gradients_are_warned_about_once(run_workers):
    (steps, told), (_, silent) = run_workers(gan, quiet=False)
    assert steps == 10 and len(told) == 1 and "accelerator.no_sync(model)" in told[0] and not silent
    assert run_workers(gan, quiet=True) == [(5, [])] * 2


def refusals():
    messages = []
    accelerator = fresh_accelerator(gradient_accumulation_steps=2)
    plugin = EDGCPlugin(STATIC, static_graph=True)
    accelerator.ddp_handler = plugin
    with pytest.raises(NotImplementedError) as caught:
        accelerator.prepare(tiny_gpt2())
    messages.append(str(caught.value))
    import torch._dynamo

    before = torch._dynamo.config.optimize_ddp
    torch._dynamo.config.optimize_ddp = "python_reducer"
    try:
        with pytest.raises(NotImplementedError) as caught:
            fresh_accelerator(kwargs_handlers=[EDGCPlugin(STATIC)]).prepare(tiny_gpt2())
    finally:
        torch._dynamo.config.optimize_ddp = before
    messages.append(str(caught.value))
    plugin = EDGCPlugin(STATIC)
    fresh_accelerator(kwargs_handlers=[plugin])
    model = tiny_gpt2()  # never prepared
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(input_ids=torch.ones(1, 8, dtype=torch.long), labels=torch.ones(1, 8, dtype=torch.long)).loss.backward()
    with listening() as told:
        optimizer.step()
    messages.append(told[0])
    return messages


@pytest.mark.fault(
    "static_graph with accumulation, python_reducer, workers without DDP",
    "refused by name before training; the last warned about",
)
def test_what_can_not_work_is_refused_by_name(run_workers):
    for static_graph, python_reducer, unprepared in run_workers(refusals):
        assert "static_graph=True with gradient accumulation" in static_graph
        assert "python_reducer" in python_reducer
        assert "no model was wrapped in DDP" in unprepared and "accelerator.prepare" in unprepared


def test_the_plugin_stands_in_for_accelerates_ddp_handler():
    from accelerate.utils import DistributedDataParallelKwargs

    plugin = EDGCPlugin(STATIC, find_unused_parameters=True)
    assert isinstance(plugin, EDGCPlugin) and plugin.__class__ is DistributedDataParallelKwargs
    assert plugin.to_kwargs() == {"find_unused_parameters": True}, "only DDP's own options reach DDP"
    for twin in (copy.deepcopy(plugin), pickle.loads(pickle.dumps(plugin))):
        assert isinstance(twin, EDGCPlugin) and twin.config == STATIC and twin.find_unused_parameters
    with pytest.raises(ValueError, match="comm_hook"):
        EDGCPlugin(STATIC, comm_hook="fp16")


@pytest.mark.parametrize(
    "kind, launched, error, message",
    [
        ("FSDP", "2", NotImplementedError, "FSDP synchronizes gradients itself"),
        ("DEEPSPEED", "2", NotImplementedError, "DEEPSPEED synchronizes gradients itself"),
        ("MEGATRON_LM", "2", NotImplementedError, "MEGATRON_LM synchronizes gradients itself"),
        ("NO", "2", RuntimeError, "WORLD_SIZE is 2, but Accelerate sees a single process"),
    ],
)
def test_other_setups_are_named(monkeypatch, kind, launched, error, message):
    from types import SimpleNamespace

    from accelerate.utils import DistributedType

    from hf_edgc.support import check_supported

    monkeypatch.setenv("WORLD_SIZE", launched)
    with pytest.raises(error, match=message):
        check_supported(SimpleNamespace(distributed_type=DistributedType(kind)))


ONE_PROCESS = """
import torch
from accelerate import Accelerator
from hf_edgc import EDGCPlugin
assert not torch.cuda.is_initialized()
accelerator = Accelerator(cpu=True, kwargs_handlers=[EDGCPlugin()])
model = torch.nn.Linear(4, 4)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(3):
    accelerator.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()
"""


def test_one_process_trains_and_is_told_once_that_nothing_is_compressed():
    result = subprocess.run([sys.executable, "-c", ONE_PROCESS], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("nothing is compressed") == 1
