"""Structured output: grammars compiled beside the loop, and one state per request that says which tokens come next."""
