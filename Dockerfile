# kg and kgctl, for this machine's architecture:
#   DOCKER_BUILDKIT=1 docker build -t kilo-ebpf/kilo:0.1.0 .
# For amd64 and arm64 in one image, which needs another builder and binfmt (docs/install.md):
#   docker buildx build --platform linux/amd64,linux/arm64 -t REGISTRY/kilo:0.1.0 --push .
# Without a registry or an engine, from this file: cargo xtask image
# Compilers run on the machine's own architecture; only the stage `root` installs
# packages under emulation.
# Paths are those of Kilo's image, so that DaemonSets written for it work:
# /opt/bin/kg is the entry point, /opt/cni/bin holds the CNI plugins.
#
# Bases are named by tag for people and by digest for machines. To renew one, pull the
# tag and write what `docker buildx imagetools inspect IMAGE:TAG` calls the digest.
# Without a registry, cargo xtask image makes images of the same tags and names them
# by --build-arg.
ARG RUST_IMAGE=rust:1.95-bookworm@sha256:6258907abe69656e41cd992e0b705cdcfabcbbe3db374f92ed2d47121282d4a1
ARG PLUGINS_IMAGE=debian:forky-slim@sha256:91b0aaebf7a1ccacfe7a9cbff6ab2d6be7d9b3b6cf1dfcf44b25f9095c0e0464
ARG DEBIAN_IMAGE=debian:bookworm-slim@sha256:3783cc01769c7b2b1b83a5c5ad96c815348e28ed7da68e2e3687004faa906251

# Crates of the same names as ours and nothing in them: dependencies are layers of their
# own, which change with Cargo.lock and not with our sources.
FROM --platform=$BUILDPLATFORM ${RUST_IMAGE} AS crates
WORKDIR /src
# Writes into each program which crates it is made of, where scanners find it.
RUN cargo install --quiet --locked --version 0.7.7 cargo-auditable
COPY Cargo.toml Cargo.lock ./
COPY kilo-agent/Cargo.toml kilo-agent/
COPY kilo-agent/core/Cargo.toml kilo-agent/core/
COPY kilo-agent/failover/Cargo.toml kilo-agent/failover/
COPY kilo-agent/failover-sim/Cargo.toml kilo-agent/failover-sim/
COPY kilo-agent/fuzz/Cargo.toml kilo-agent/fuzz/
COPY kilo-agent/host/Cargo.toml kilo-agent/host/
COPY kilo-agent/test-support/Cargo.toml kilo-agent/test-support/
COPY kilo-common/Cargo.toml kilo-common/
COPY kilo-ebpf/Cargo.toml kilo-ebpf/
COPY xtask/Cargo.toml xtask/
COPY xtask/lab/Cargo.toml xtask/lab/
RUN mkdir -p empty && cp -r --parents Cargo.toml */Cargo.toml */*/Cargo.toml empty/ \
 && cd empty && cp ../Cargo.lock . \
 && for crate in kilo-agent kilo-agent/core kilo-agent/failover kilo-agent/failover-sim kilo-agent/fuzz \
      kilo-agent/host kilo-agent/test-support kilo-common kilo-ebpf xtask xtask/lab; do \
      mkdir -p "$crate/src/bin/kg" "$crate/src/bin/kgctl" \
      && touch "$crate/src/lib.rs" \
      && echo 'fn main() {}' | tee "$crate/src/main.rs" "$crate/src/bin/kg/main.rs" \
           "$crate/src/bin/kgctl/main.rs" > /dev/null || exit 1; \
    done \
 && mkdir kilo-agent/benches && touch kilo-agent/benches/control.rs

# The BPF object is the same for both architectures.
FROM crates AS bpf
RUN cd empty && cargo build --locked --package xtask --target-dir /src/target
COPY . .
# Sources are older than what was made of the empty crates, which cargo would take for
# theirs.
RUN find . -name '*.rs' -not -path './target/*' -exec touch {} + \
 && cargo xtask build-ebpf

FROM crates AS kilo
ARG TARGETARCH
ENV CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_LINKER=x86_64-linux-gnu-gcc \
    CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
    CARGO_PROFILE_RELEASE_STRIP=debuginfo \
    CARGO_PROFILE_RELEASE_LTO=fat \
    CARGO_PROFILE_RELEASE_CODEGEN_UNITS=1
# The distribution's updates are wanted: no version is pinned here and below.
# hadolint ignore=DL3008
RUN case "$TARGETARCH" in \
      amd64) cpu=x86_64 gcc=gcc-x86-64-linux-gnu ;; \
      arm64) cpu=aarch64 gcc=gcc-aarch64-linux-gnu ;; \
      *) echo "no build for $TARGETARCH" >&2; exit 1 ;; \
    esac \
 && if [ "$TARGETARCH" != "$(dpkg --print-architecture)" ]; then \
      apt-get update \
      && apt-get install --yes --no-install-recommends "$gcc" "libc6-dev-$TARGETARCH-cross" \
      && rm -rf /var/lib/apt/lists/*; \
    fi \
 && rustup target add "$cpu-unknown-linux-gnu" \
 && echo "$cpu-unknown-linux-gnu" > /target
RUN cd empty \
 && cargo build --locked --release --package kilo-agent --target "$(cat /target)" --target-dir /src/target
COPY . .
COPY --from=bpf /src/target/bpf/kilo.o target/bpf/kilo.o
# As one unit `kg` holds less memory, but takes a third of an hour to compile; kgctl runs only for moments.
RUN find . -name '*.rs' -not -path './target/*' -exec touch {} + \
 && cargo auditable build --locked --release --package kilo-agent --bin kg --target "$(cat /target)" \
 && cargo auditable rustc --locked --release --package kilo-agent --bin kgctl --target "$(cat /target)" -- -C lto=thin \
 && mkdir /out \
 && cp "target/$(cat /target)/release/kg" "target/$(cat /target)/release/kgctl" /out/

# Of the suite that has current plugins, with its compiler; Debian's own binaries want
# the host's C library to be as new as theirs. These are static, since they run on the
# host. They print their version, by which the DaemonSet's init container leaves newer
# ones of the host alone.
FROM --platform=$BUILDPLATFORM ${PLUGINS_IMAGE} AS cni
# hadolint ignore=DL3008
RUN sed -i 's/^Types: deb$/Types: deb deb-src/' /etc/apt/sources.list.d/debian.sources \
 && apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates dpkg-dev golang-go xz-utils \
    golang-github-containernetworking-plugins-dev \
    golang-github-mattn-go-shellwords-dev
WORKDIR /build
ARG TARGETARCH
# The package for developers has the libraries without the programs.
RUN apt-get source --only-source --tar-only golang-github-containernetworking-plugins \
 && tar --extract --file golang-github-containernetworking-plugins_*.orig.tar.* \
 && rm golang-github-containernetworking-plugins_* \
 && version=$(echo golang-github-containernetworking-plugins-* | sed 's/.*-\([0-9.]*\).*/\1/') \
 && package=github.com/containernetworking/plugins \
 && plugins=/usr/share/gocode/src/$package \
 && rm -r "$plugins" \
 && mv golang-github-containernetworking-plugins-* "$plugins" \
 && for plugin in main/bridge main/loopback ipam/host-local meta/portmap; do \
      GO111MODULE=off GOPATH=/usr/share/gocode CGO_ENABLED=0 GOARCH="$TARGETARCH" \
      go build -trimpath \
        -ldflags "-s -w -buildid= -X $package/pkg/utils/buildversion.BuildVersion=v$version" \
        -o "/out/${plugin#*/}" "$package/plugins/$plugin" || exit 1; \
    done

# The platform is named because buildah 1.28 goes on with that of the stage before.
FROM --platform=$TARGETPLATFORM ${DEBIAN_IMAGE} AS root
# Certificates for kubeconfigs that trust public authorities; iptables for
# --iptables-forward-rules, nftables for --masquerade=nftables. Logs and caches bear the
# time of the build, and would make each image another one. What only installs, or
# is a second shell, goes: sh and the tools beside it are what init containers of
# Kilo's DaemonSets need. tzdata asks debconf when it goes.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates iptables nftables \
 && dpkg --purge --force-depends tzdata \
 && dpkg --purge --force-depends --force-remove-essential --force-remove-protected \
    adduser apt bash debconf debian-archive-keyring e2fsprogs gpgv libapt-pkg6.0 libext2fs2 \
    libss2 libssl3 libstdc++6 login logsave mount openssl passwd perl-base \
 && rm -rf /var/lib/apt /var/cache/apt /var/cache/debconf /var/cache/ldconfig/aux-cache \
    /var/lib/dpkg/*-old /var/log/* /etc/*- /etc/apt /root/.bashrc

# The agent wants capabilities, which Kubernetes gives to root only; the webhook runs as any user.
# One layer: what was removed above is in none.
FROM scratch
COPY --from=root / /
COPY --from=cni /out/ /opt/cni/bin/
COPY --from=kilo /out/ /opt/bin/
ENV PATH=/opt/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
ARG VERSION=0.1.0
ARG REVISION
ARG DEBIAN_IMAGE
LABEL org.opencontainers.image.title="kilo" \
      org.opencontainers.image.description="Kilo's mesh of Kubernetes nodes on eBPF" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION" \
      org.opencontainers.image.source="https://github.com/kilo-ebpf/kilo" \
      org.opencontainers.image.url="https://github.com/kilo-ebpf/kilo" \
      org.opencontainers.image.documentation="https://github.com/kilo-ebpf/kilo/tree/main/docs" \
      org.opencontainers.image.vendor="kilo-ebpf" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="$DEBIAN_IMAGE"
ENTRYPOINT ["/opt/bin/kg"]
