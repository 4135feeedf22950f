"""Make report.png, the picture of README: ``PYTHONPATH=. python tutorials/pictures/make.py``.

The page is the library's own, photographed by Debian's chromium: a GPT of 0.6 billion parameters on eight H100
within 14 GiB.
"""

import subprocess
import tempfile
from pathlib import Path

import torch
from PIL import Image
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from autop_ac import AutoParallel, fake_mesh
from tests.gpt import GPT, GPTConfig, mean_loss

SIZE = (1080, 1230)
PICTURE = Path(__file__).with_name("report.png")


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.zeros(128, 2048, dtype=torch.long, device="meta")
    return tokens, tokens


def main() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(8192, 2048, 16, 12, 2048, tied=False, bias=False))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ap = AutoParallel(model, batch, fake_mesh(8, ["dp"]), policy, loss_fn=mean_loss)
    ap.configure_ac(memory_budget="14 GiB", optimizer="adamw")
    with ap.configure_device("H100").configure_compile("eager"):
        ap.add_input_constraints([(Shard(0),), (Shard(0),)])
        ap.add_parameter_memory_constraint()
        ap.optimize_placement()
    with tempfile.TemporaryDirectory() as folder:
        page = ap.ac_report.save(f"{folder}/report.html", pareto=ap.pareto(depth=2))
        shot = page.with_suffix(".png")
        window = f"--window-size={SIZE[0]},{SIZE[1] + 10}"
        flags = ["--headless", "--no-sandbox", "--hide-scrollbars", window, f"--screenshot={shot}"]
        subprocess.run(["chromium", *flags, page.as_uri()], check=True, capture_output=True)
        picture = Image.open(shot).convert("RGB").crop((0, 0, *SIZE))
    few = picture.quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    few.save(PICTURE, optimize=True)


if __name__ == "__main__":
    main()
