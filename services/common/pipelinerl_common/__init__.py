"""What every service shares: types, codec, settings, stream, rpc, service skeleton, errors. Imports
neither torch nor vLLM.
"""
