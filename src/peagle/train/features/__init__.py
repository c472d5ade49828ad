"""The target's hidden states from elsewhere than this process, which `teacher_forcing` has.

capture        states on disk: written by `peagle capture`, read by training
vllm_features  states from a vLLM server, asked for ahead of the step
vllm_client    one request for one document, and the file that answers it
vllm_server    finds room for the files, starts a server that ends with us, and opens its features
"""
