"""The configuration files, read with Accelerate's own loader and launcher."""

from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType

CONFIGS = Path(__file__).parents[1] / "accelerate_configs"
EXPECTED = {
    # name: distributed type, use_cpu, machines, processes over all machines
    "cpu_2proc": (DistributedType.MULTI_GPU, True, 1, 2),
    "single_gpu": (DistributedType.NO, False, 1, 1),
    "multi_gpu": (DistributedType.MULTI_GPU, False, 1, 8),
    "multi_node": (DistributedType.MULTI_GPU, False, 2, 2 * 8),
}


def test_every_file_is_expected_here():
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == set(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_accelerate_loads(name):
    config = load_config_from_file(str(CONFIGS / f"{name}.yaml"))
    seen = (config.distributed_type, config.use_cpu, config.num_machines, config.num_processes)
    assert seen == EXPECTED[name]
    assert config.mixed_precision == "no"


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_launcher_accepts(name):
    arguments = launch_command_parser().parse_args(
        ["--config_file", str(CONFIGS / f"{name}.yaml"), "--num_cpu_threads_per_process", "1", "script.py"]
    )
    resolved, _, _ = _validate_launch_command(arguments)
    kind, use_cpu, machines, processes = EXPECTED[name]
    assert (resolved.num_processes, resolved.num_machines, resolved.use_cpu) == (processes, machines, use_cpu)
    # Only this launcher starts several processes on one machine; test_cli shows that they cooperate.
    assert resolved.multi_gpu == (kind is DistributedType.MULTI_GPU)


def test_lines_to_change_for_several_machines_are_marked():
    lines = (CONFIGS / "multi_node.yaml").read_text(encoding="utf-8").splitlines()
    marked = {line.partition(":")[0] for line in lines if "# change" in line}
    assert {"machine_rank", "main_process_ip", "main_process_port", "num_processes"} <= marked
