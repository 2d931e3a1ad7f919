"""Reads text and tokens from an object store: `data.source = "s3://bucket/prefix"`.

text.py reads raw text, corpus.py a prepared corpus, whose shards blocks.py fetches in blocks, and
upload.py puts a prepared folder there. ahead.py prefetches the blocks of the next steps. Requests,
their retries and credentials are in reliability/objects.py.
"""
