"""A tiny ONNX model with Kokoro's inputs and output, and voices of noise beside it.

Its wave is a tone whose phase follows the phonemes and whose loudness follows the style; it lasts
600 samples per phoneme at speed 1. Written without the package onnx, as protocol buffers.
"""

import struct
from pathlib import Path

import msgspec
import numpy as np

FLOAT, INT64 = 1, 7


def write_tiny_kokoro(folder: Path, names: list[str], ids_name: str = "input_ids") -> Path:
    """Write the model, the voices and `voice.json` into `folder`."""
    (folder / "voices").mkdir(parents=True)
    for number, name in enumerate(names):
        styles = np.random.default_rng(number).uniform(0.2, 0.8, (510, 256)).astype(np.float32)
        (folder / "voices" / f"{name}.bin").write_bytes(styles.tobytes())
    (folder / "model.onnx").write_bytes(_model(ids_name))
    (folder / "voice.json").write_bytes(
        msgspec.json.encode({"voice": "kokoro", "voices": names, "model": "model.onnx"})
    )
    return folder


def _model(ids: str) -> bytes:
    nodes = [
        _node("Reshape", [ids, "flat"], "phonemes"),
        _node("Size", [ids], "count"),
        _node("Cast", ["count"], "count_f", to=FLOAT),
        _node("Reshape", ["speed", "scalar"], "pace"),
        _node("Mul", ["count_f", "unit"], "samples_f"),
        _node("Div", ["samples_f", "pace"], "length_f"),
        _node("Cast", ["length_f"], "length", to=INT64),
        _node("Range", ["zero", "length", "one"], "at"),
        _node("Cast", ["at"], "at_f", to=FLOAT),
        _node("Mul", ["at_f", "pace"], "paced"),
        _node("Div", ["paced", "unit"], "place_f"),
        _node("Cast", ["place_f"], "place", to=INT64),
        _node("Gather", ["phonemes", "place"], "sounding"),
        _node("Cast", ["sounding"], "phase", to=FLOAT),
        _node("Mul", ["at_f", "pitch"], "turn"),
        _node("Add", ["turn", "phase"], "angle"),
        _node("Sin", ["angle"], "tone"),
        _node("ReduceMean", ["style"], "loudness", keepdims=0),
        _node("Mul", ["tone", "loudness"], "waveform"),
    ]
    constants = [
        _tensor("flat", INT64, [1], struct.pack("<q", -1)),
        _tensor("scalar", INT64, [0], b""),
        _tensor("zero", INT64, [], struct.pack("<q", 0)),
        _tensor("one", INT64, [], struct.pack("<q", 1)),
        _tensor("unit", FLOAT, [], struct.pack("<f", 600.0)),
        _tensor("pitch", FLOAT, [], struct.pack("<f", 0.06)),
    ]
    inputs = [_value(ids, INT64), _value("style", FLOAT), _value("speed", FLOAT)]
    graph = b"".join(
        [
            *(_field(1, node) for node in nodes),
            _field(2, b"tiny"),
            *(_field(5, constant) for constant in constants),
            *(_field(11, value) for value in inputs),
            _field(12, _value("waveform", FLOAT)),
        ]
    )
    return _number(1, 8) + _field(7, graph) + _field(8, _number(2, 13))


def _node(kind: str, inputs: list[str], output: str, **attributes: int) -> bytes:
    made = b"".join(_field(1, name.encode()) for name in inputs)
    made += _field(2, output.encode()) + _field(4, kind.encode())
    for name, value in attributes.items():
        made += _field(5, _field(1, name.encode()) + _number(3, value) + _number(20, 2))
    return made


def _tensor(name: str, kind: int, shape: list[int], data: bytes) -> bytes:
    dims = b"".join(_number(1, size) for size in shape)
    return dims + _number(2, kind) + _field(8, name.encode()) + _field(9, data)


def _value(name: str, kind: int) -> bytes:
    return _field(1, name.encode()) + _field(2, _field(1, _number(1, kind)))


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _varint(value: int) -> bytes:
    low, rest = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + _varint(rest) if rest else bytes([low])
