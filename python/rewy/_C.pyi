version: str

def saved_bytes_of_chunk(
    op: str, key_width: int, value_width: int, dtype: str, policy: str, cuda_device: int, backend: str
) -> int: ...
