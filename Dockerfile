# docker buildx build --platform linux/amd64,linux/arm64 -t kilo-ebpf/kilo:0.1.0 .
FROM rust:1.95-bookworm AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential pkg-config zlib1g-dev \
    && rm -rf /var/lib/apt/lists/* \
    && rustup component add rust-src
WORKDIR /src
COPY . .
RUN cargo xtask build-ebpf \
    && cargo build --release --locked --bin kg --bin kgctl \
    && strip target/release/kg target/release/kgctl

FROM debian:bookworm-slim
# The init container copies the CNI plugins to the host.
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates containernetworking-plugins diffutils \
    && rm -rf /var/lib/apt/lists/* \
    && mkdir -p /opt/cni \
    && ln -s /usr/lib/cni /opt/cni/bin
COPY --from=build /src/target/release/kg /src/target/release/kgctl /usr/local/bin/
# The agent needs capabilities that Kubernetes gives to root only; see manifests/.
ENTRYPOINT ["/usr/local/bin/kg"]
