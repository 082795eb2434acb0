"""A GGUF file cut into parts by gguf's own writer, as `llama-gguf-split` does."""

from __future__ import annotations

from pathlib import Path

import gguf


def split_gguf(source: Path, folder: Path, tensors: int, *, bare_first: bool = False) -> list[Path]:
    """Write a file's metadata and tensors into parts of at most so many tensors.

    Args:
        bare_first: whether the first part holds metadata alone.
    """
    reader = gguf.GGUFReader(source)
    field = reader.fields[gguf.Keys.General.ARCHITECTURE]
    writer = gguf.GGUFWriter(
        folder / source.name,
        str(field.contents()),
        split_max_tensors=tensors,
        small_first_shard=bare_first,
    )
    for field in reader.fields.values():
        if field.name == gguf.Keys.General.ARCHITECTURE or field.name.startswith("GGUF."):
            continue
        kind = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=kind)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob(f"{source.stem}-*-of-*.gguf"))
