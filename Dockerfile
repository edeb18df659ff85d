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
