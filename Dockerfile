# The CPU image: docker build --target cpu -t mla-serve:cpu .
#   docker run --rm -p 127.0.0.1:8000:8000 mla-serve:cpu                                    the demo model
#   docker run --rm -p 127.0.0.1:8000:8000 -v /models/x:/model:ro mla-serve:cpu /model      a checkpoint of yours
# On Linux a plain torch brings CUDA libraries of several GB; name an index of CPU wheels with --build-arg TORCH_INDEX=...
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
ARG TORCH_INDEX=""
RUN python -m venv /opt/mla-serve
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
# The dependencies first: a change of our own code then rebuilds the last layer only.
RUN mkdir mla_serve && printf '__version__ = "0"\n' > mla_serve/__init__.py \
    && /opt/mla-serve/bin/pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url ${TORCH_INDEX}} -c constraints.txt . \
    && /opt/mla-serve/bin/pip uninstall -y mla-serve
COPY mla_serve mla_serve
RUN /opt/mla-serve/bin/pip install --no-cache-dir --no-deps .

FROM python:${PYTHON}-slim AS cpu
RUN useradd --create-home --uid 10001 mla
COPY --from=build /opt/mla-serve /opt/mla-serve
ENV PATH=/opt/mla-serve/bin:$PATH PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
USER mla
WORKDIR /home/mla
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
# A container has its own network: publish the port to loopback, or set keys (--api-key-file) before you publish it wider.
ENTRYPOINT ["mla-serve", "serve", "--host", "0.0.0.0"]

# The GPU image: docker build --target gpu -t mla-serve:gpu .
#   docker run --rm --gpus all --ipc host -p 127.0.0.1:8000:8000 -v /models/x:/model:ro mla-serve:gpu /model
#   ... /model --tensor-parallel-size 8 -- --max-num-seqs 256         what follows -- are vLLM's own flags
# A decision file of yours: -v /tables/h200.json:/decisions.json:ro ... /model --decisions /decisions.json
FROM nvidia/cuda:13.0.1-runtime-ubuntu24.04 AS gpu
ARG VLLM=0.32.0
# A compiler and headers: FlashInfer and Triton build kernels when they are first met.
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv python3-dev gcc g++ ninja-build cuda-nvcc-13-0 \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/mla-serve \
    && /opt/mla-serve/bin/pip install --no-cache-dir "vllm==${VLLM}"
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY mla_serve mla_serve
RUN /opt/mla-serve/bin/pip install --no-cache-dir . && useradd --create-home --uid 10001 mla
ENV PATH=/opt/mla-serve/bin:$PATH PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
USER mla
WORKDIR /home/mla
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=900s --retries=3 \
    CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["mla-serve", "serve", "--host", "0.0.0.0", "--engine", "vllm"]

# One layer over vLLM's own image: docker build --target vllm-plugin -t vllm-mla-serve .
#   docker run --rm --gpus all --ipc host -p 127.0.0.1:8000:8000 -v /models/x:/model:ro vllm-mla-serve --model /model \
#     --attention-backend CUSTOM -ac.mla_prefill_backend=CUSTOM
FROM vllm/vllm-openai:v0.32.0 AS vllm-plugin
COPY pyproject.toml README.md LICENSE /src/mla_serve/
COPY mla_serve /src/mla_serve/mla_serve
RUN python3 -m pip install --no-cache-dir /src/mla_serve
