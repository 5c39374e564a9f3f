"""The fleet's coordinator: who is a member and which server holds which chunk.

Its contract is `kvwire/v1/coordinator_service.proto`; until this program serves it, a cache server answers
those methods with UNIMPLEMENTED.
"""
