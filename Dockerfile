# kg and kgctl, for amd64 and arm64:
#   docker buildx build --platform linux/amd64,linux/arm64 -t kilo-ebpf/kilo:0.1.0 .
# Paths are those of Kilo's image, so that DaemonSets written for it work:
# /opt/bin/kg is the entry point, /opt/cni/bin holds the CNI plugins.

# The BPF object is the same for both architectures and built from source, too.
FROM rust:1.95-bookworm AS kilo
WORKDIR /src
COPY . .
RUN cargo xtask build-ebpf \
 && cargo build --locked --release --package kilo-agent --bins \
 && mkdir -p /out \
 && install target/release/kg target/release/kgctl /out/ \
 && strip --strip-debug /out/kg /out/kgctl

# Debian's binaries of the plugins want the host's C library to be as new as
# Debian's; these are static, since they run on the host.
FROM debian:bookworm-slim AS cni
RUN sed -i 's/^Types: deb$/Types: deb deb-src/' /etc/apt/sources.list.d/debian.sources \
 && apt-get update \
 && apt-get install --yes --no-install-recommends dpkg-dev golang-go \
    golang-github-containernetworking-plugins-dev \
    golang-github-mattn-go-shellwords-dev \
    golang-github-networkplumbing-go-nft-dev
WORKDIR /build
RUN apt-get source --only-source golang-github-containernetworking-plugins \
 && plugins=/usr/share/gocode/src/github.com/containernetworking/plugins \
 && rm -r "$plugins" \
 && mv golang-github-containernetworking-plugins-*/ "$plugins" \
 && for plugin in main/bridge main/loopback ipam/host-local meta/portmap; do \
      GO111MODULE=off GOPATH=/usr/share/gocode CGO_ENABLED=0 \
      go build -trimpath -ldflags '-s -w' -o /out/ \
        "github.com/containernetworking/plugins/plugins/$plugin" || exit 1; \
    done

FROM debian:bookworm-slim
# For kubeconfigs that trust public certificate authorities.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates iptables \
 && rm -rf /var/lib/apt/lists/*
COPY --from=cni /out/ /opt/cni/bin/
COPY --from=kilo /out/ /opt/bin/
ENV PATH=/opt/bin:$PATH
ENTRYPOINT ["/opt/bin/kg"]
