"""Structured output: grammars compiled beside the engine, and masks of what they allow next."""
