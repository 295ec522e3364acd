"""Lists the texts of tokens that begin and end turns, for files that mark none or other tokens as such."""

# Tokens that end a turn. Older files name no end-of-turn token, or no second end token.
END_TOKENS = frozenset(
    {
        *("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|eot|>"),
        *("<|end_of_text|>", "<｜end▁of▁sentence｜>", "<end_of_utterance>", "<EOT>", "▁<EOT>"),
    }
)
# Control tokens, whatever type a file gives them. "</s>" is not among them, since Qwen's vocabulary has it as a word.
TURN_TOKENS = END_TOKENS | {
    *("<|im_start|>", "<|im_sep|>", "<start_of_turn>", "<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|header_start|>", "<|header_end|>", "<|start_of_role|>"),
    *("<|end_of_role|>", "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    *("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
}
