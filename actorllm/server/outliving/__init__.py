"""Streams that outlive their readers: events are numbered and kept, and a client that comes back reads on behind the last it has.

Reading order: the events (`record`), their writer and their readers (`reader`), for how long (`resume`), and the life of such a
stream (`streams`). `paths` has those of OpenAI's older APIs, and `responses` its own. `elsewhere` reads in other API processes.
"""
