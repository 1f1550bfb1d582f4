"""Fields of requests that would change the answer and are refused, with the values that change nothing."""

from __future__ import annotations

Values = tuple[object, ...]

_IN_BOTH: dict[str, Values] = {
    "n": (1,),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    # Of vLLM, SGLang, llama.cpp, mlx-lm, and services.
    "adapters": (),
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "ebnf": (),
    "grammar": ("",),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "lora_path": (),
    "min_p": (0,),
    "min_tokens": (0,),
    "mirostat": (0,),
    "n_predict": (),
    "no_stop_trim": (False,),
    "prompt_logprobs": (),
    "regex": (),
    "repeat_penalty": (1, 0),
    "repetition_penalty": (1, 0),
    "skip_special_tokens": (False,),
    "stop_regex": ([],),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "top_a": (0,),
    "top_k": (0, -1),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "xtc_probability": (0,),
}
IN_CHATS: dict[str, Values] = {
    **_IN_BOTH,
    "audio": (),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    # Of other servers.
    "add_generation_prompt": (True,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "enable_thinking": (),
    "reasoning": (),
    "role_mapping": (),
    "thinking": (),
    "thinking_budget": (),
}
IN_TEXTS: dict[str, Values] = {**_IN_BOTH, "echo": (False,), "suffix": ("",)}
IN_MESSAGES: dict[str, Values] = {
    "audio": (),
    "function_call": (),
    "prefix": (False,),  # of DeepSeek and Mistral
    "reasoning_content": ("",),  # of DeepSeek, vLLM and others
}
