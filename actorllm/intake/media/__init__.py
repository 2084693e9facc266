"""Images of prompts: read, prepared by the model's processor, encoded beside the steps of the engine.

`images` decodes what a caller gives, within bounds. `media_reader` makes a prompt of text and images. `media_encoder` is the
encoder actor, `encoder_program` its process. The tower itself is `model.hf.tower`. Called by the intake.
"""
