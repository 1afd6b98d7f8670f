"""Makes tests/golden/torch_exported.{safetensors,npz} and torch_module.txt with PyTorch, in this folder.

The network with every layer of tests/support/exported_networks.py, as it is exported: its tensors, the text of its
module, and the logits which that module computes of them in double. Made with torch 2.14.1, which the tests that read
them do not need:

    PYTHONPATH=. python tests/golden/make_exporting.py
"""

import shutil
import tempfile
from pathlib import Path

import numpy as np

from tests.support.exported_networks import everything_as_model, images_for, of_torch

if __name__ == "__main__":
    folder, model = Path(__file__).parent, everything_as_model()
    images = images_for(model)
    with tempfile.TemporaryDirectory() as made:
        logits = of_torch(model, images, Path(made))
        shutil.copy(Path(made) / "a.safetensors", folder / "torch_exported.safetensors")
        shutil.copy(Path(made) / "written.py", folder / "torch_module.txt")
    np.savez(folder / "torch_exported.npz", images=images, logits=logits)
