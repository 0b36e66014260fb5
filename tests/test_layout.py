"""The repository as a place to work from."""

import importlib
import subprocess
import sys
from pathlib import Path

import train

ROOT = Path(train.__file__).parent


def test_transformers_can_be_imported_from_the_root():
    """transformers looks for a package called `kernels`; ours has that name and must not confuse it."""
    script = "import transformers; transformers.LlamaForCausalLM; import kernels; print(kernels.__file__)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == ROOT / "kernels" / "__init__.py"


def test_the_loop_stays_a_linear_read():
    lines = (ROOT / "train.py").read_text().splitlines()
    assert len(lines) <= 350 and not any(line.lstrip().startswith("class ") for line in lines)


def test_training_does_not_need_the_optional_packages():
    """GPU boxes are often bare, and triton is for Linux: they are imported only where they are used."""
    script = (
        "import sys\n"
        "for name in ('wandb', 'datasets', 'transformers', 'safetensors', 'matplotlib', 'tokenizers', 'triton'):\n"
        "    sys.modules[name] = None\n"
        "import train, data.prepare, twell.generate\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_commands_are_modules():
    for name in ("twell.generate", "data.prepare"):
        assert callable(importlib.import_module(name).main)
