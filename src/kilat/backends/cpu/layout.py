"""The run-time data that every CPU kernel shares: parameter names, the sequence record, tile geometry.

All kernels of one call read one int64 parameter array (`Params`). The first slots are the same for every kernel, so
that tile functions (masks, dropout, score modifiers) are written once: `COMMON` below. Strides are in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from kilat.backends.cpu.emit import Type

COMMON = (
    "seqs",  # pointer to [batch] records of SEQ
    "tasks",  # pointer to [ntasks] records; each kernel has its own record
    "ntasks",
    "counter",  # pointer to int64 [0]: next task, and 64 bytes on: next scratch slot
    "scratch",  # pointer; each thread takes one slot of scratch_stride bytes
    "scratch_stride",
    "num_heads_q",
    "group",  # query heads per kv head
    "head_dim",
    "head_dim_v",
    "dtype",  # code of the stored q, k, v: DTYPE_CODES
    "scale",  # float bits
    "n_intervals",  # 0: no interval mask (all of [0, kv_len) visible), 1 or 2
    "n_dense",
    "dense",  # pointer to [n_dense][5] int64: bool data pointer, strides b h i j
    "n_predicates",
    "predicates",  # pointer to [n_predicates][2] int64: function pointer, environment pointer
    "has_scores",  # 1 if any of softcap, alibi, bias, user scores is present
    "softcap",  # float bits; 0.0: none
    "alibi",  # pointer to slopes in the compute type, or 0; then strides b h
    "alibi_b",
    "alibi_h",
    "bias",  # pointer or 0; then its dtype code and strides b h i j
    "bias_dtype",
    "bias_b",
    "bias_h",
    "bias_i",
    "bias_j",
    "n_scores",
    "scores",  # pointer to [n_scores][3] int64: forward function, backward function, environment pointer
    "dropout",  # 0 none, 1 Philox, 2 keep tensor
    "dropout_threshold",  # uint32: kept iff word >= threshold (2**32 means p = 1: nothing kept)
    "dropout_scale",  # float bits: 1 / (1 - p), 0 for p = 1
    "seed",
    "offset",
    "keep",  # pointer to bool, strides b h i j
    "keep_b",
    "keep_h",
    "keep_i",
    "keep_j",
)

# The type of stored keys and values; where the scales of quantised ones lie, by strides as for the tokens (of one scale
# a head, all but the head's are 0); of a ring the first tokens, which stay, and the slots of the others (0: no ring).
CACHE = (
    "kv_dtype",
    "ring_first",
    "ring",
    *("k_scale", "k_scale_b", "k_scale_n", "k_scale_h", "k_scale_page"),
    *("v_scale", "v_scale_b", "v_scale_n", "v_scale_h", "v_scale_page"),
)

# One record a sequence: where its tokens start (ragged), its lengths, its mask bounds.
# bounds points to int32 [n_intervals][2][q_len]: start and stop of the visible keys of each query.
SEQ = ("q_token", "kv_token", "q_len", "kv_len", "bounds")

DTYPE_CODES = {"float32": 0, "bfloat16": 1, "float16": 2, "float64": 3}
# Keys and values of a cache may be stored in these too, with scales.
QUANTISED_CODES = {"float8_e4m3fn": 4, "int8": 5}


@dataclass(frozen=True)
class Geometry:
    """A score tile: `outer` rows of `vectors` vectors of `lanes` elements.

    query_lanes (forward): lanes are queries, rows are keys, S[key][query]. Otherwise (backward) lanes are keys.
    Tile of scores: compute[outer][vectors * lanes], dense. Tile of bits: int16[outer][vectors], bit l of a slot
    belongs to lane l of that vector.
    """

    compute: Type  # F32 or F64
    lanes: int
    vectors: int
    outer: int = 64
    query_lanes: bool = True

    @property
    def width(self) -> int:
        """Elements in a row."""
        return self.lanes * self.vectors

    @property
    def vector(self) -> Type:
        return self.compute.vec(self.lanes)

    @property
    def row_bytes(self) -> int:
        return self.width * self.compute.bytes

    @property
    def bits_row_bytes(self) -> int:
        return 2 * self.vectors
