"""The side of ONNX Runtime in benchmarks/encode.py, which runs this in `.venv-onnx`.

python benchmarks/onnx_side.py MODEL SENTENCES.json VECTORS.npy

The ONNX backend of sentence-transformers, in float32: Optimum exports the model when it is loaded,
and `encode` sorts the sentences by length. There is no bert_jax in that environment.
"""

import json
import pathlib
import sys
import time

import numpy as np
from sentence_transformers import SentenceTransformer

BATCH = 32


def main(directory: str, texts: str, output: str) -> None:
    model = SentenceTransformer(
        directory,
        backend="onnx",
        model_kwargs={"export": True, "provider": "CPUExecutionProvider"},
        local_files_only=True,
    )
    model.max_seq_length = 512
    sentences = json.loads(pathlib.Path(texts).read_text(encoding="utf-8"))
    started = time.perf_counter()
    vectors = model.encode(sentences, batch_size=BATCH, normalize_embeddings=False)
    seconds = time.perf_counter() - started
    np.save(output, vectors)
    print(json.dumps([seconds, 0]))


if __name__ == "__main__":
    main(*sys.argv[1:])
