"""Conversions between the body of a block and the arrays of MLX and vLLM."""

from kvpage_server.layouts import from_mlx, keys_from_vllm, keys_to_vllm, to_mlx, values_from_vllm, values_to_vllm

__all__ = ["from_mlx", "keys_from_vllm", "keys_to_vllm", "to_mlx", "values_from_vllm", "values_to_vllm"]
