# No vLLM: an image that has what the Dockerfile's target `plugin` looks for in one.
ARG BASE
FROM ${BASE}
ARG PACKAGES
RUN python3 -m venv /opt/venv \
    && /opt/venv/bin/pip install -q --no-index --find-links /mirror ${PACKAGES} \
    && folder=$(echo /opt/venv/lib/python3.*/site-packages)/vllm-0.32.0.dist-info \
    && mkdir "$folder" \
    && printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n' > "$folder/METADATA"
ENV PATH=/opt/venv/bin:$PATH
ENTRYPOINT ["vllm", "serve"]
