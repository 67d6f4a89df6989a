version: str
chunk: int

def keeps(op: str, options: str) -> tuple[bool, bool]: ...
def saved_bytes_of_chunk(
    op: str, key_width: int, value_width: int, dtype: str, cuda_device: int, options: str
) -> int: ...
def activated_bytes_of_token(
    op: str,
    heads: int,
    value_heads: int,
    key_width: int,
    dtype: str,
    gate_dtype: str,
    strength_dtype: str,
    options: str,
) -> int: ...
