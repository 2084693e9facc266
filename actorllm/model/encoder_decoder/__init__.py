"""Models with an encoder beside the decoder (BART, T5, Whisper): the decoder's fused forward, and the encoder as its actor runs it.

The rows that the encoder makes of a request's input are fixed. They stand before the decoder's tokens in the blocks of the request.
At their places a layer of the cache has the keys and values of cross attention, in the shape of those of tokens. So they are
computed once while the request has a slot. Prefix hits find them, forks share them, and a preempted request computes them again.
"""
