#include "host.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <net/if.h>
#include <net/route.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

namespace lab {
namespace {

constexpr int kTransmitQueue = 10000;  // packets; the router limits queues, not the device

[[noreturn]] void fail(const std::string& what) { throw std::runtime_error(what + ": " + std::strerror(errno)); }

void write_file(const std::string& path, const std::string& text, bool required = true) {
    const int fd = open(path.c_str(), O_WRONLY | O_CLOEXEC);
    const bool written = fd >= 0 && write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size());
    const int error = errno;
    if (fd >= 0) close(fd);
    errno = error;
    if (!written && required) fail("cannot write " + text + " to " + path);
}

void set_up(int sock, const char* device) {
    ifreq request{};
    std::strncpy(request.ifr_name, device, IFNAMSIZ - 1);
    if (ioctl(sock, SIOCGIFFLAGS, &request) < 0) fail(std::string("cannot read the flags of ") + device);
    request.ifr_flags |= IFF_UP | IFF_RUNNING;
    if (ioctl(sock, SIOCSIFFLAGS, &request) < 0) fail(std::string("cannot bring up ") + device);
}

void set_address(int sock, const char* device, unsigned long what, const std::string& address) {
    ifreq request{};
    std::strncpy(request.ifr_name, device, IFNAMSIZ - 1);
    auto* in = reinterpret_cast<sockaddr_in*>(&request.ifr_addr);
    in->sin_family = AF_INET;
    if (inet_pton(AF_INET, address.c_str(), &in->sin_addr) != 1) throw std::runtime_error("bad address " + address);
    if (ioctl(sock, what, &request) < 0) fail("cannot set address " + address);
}

// Routes all packets to the router, except those to the host's own address.
void add_default_route(int sock, const char* device) {
    rtentry route{};
    route.rt_dst.sa_family = route.rt_genmask.sa_family = route.rt_gateway.sa_family = AF_INET;
    route.rt_flags = RTF_UP;
    std::string name = device;
    route.rt_dev = name.data();
    if (ioctl(sock, SIOCADDRT, &route) < 0 && errno != EEXIST) fail("cannot set a route");
}

void set_v4(const std::string& address) {
    const int sock = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (sock < 0) fail("cannot open a socket");
    set_address(sock, "wan0", SIOCSIFADDR, address);
    set_address(sock, "wan0", SIOCSIFNETMASK, "255.255.255.0");
    set_up(sock, "wan0");
    add_default_route(sock, "wan0");
    close(sock);
}

struct Request6 {  // struct in6_ifreq of linux/ipv6.h, which cannot be included beside netinet/in.h
    in6_addr address;
    uint32_t prefix;
    int index;
};

void set_v6(const std::string& address) {
    const int sock = socket(AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (sock < 0) fail("cannot open an IPv6 socket: the kernel has no IPv6");
    Request6 request{};
    request.prefix = 64;
    request.index = static_cast<int>(if_nametoindex("wan0"));
    if (inet_pton(AF_INET6, address.c_str(), &request.address) != 1) throw std::runtime_error("bad address " + address);
    if (ioctl(sock, SIOCSIFADDR, &request) < 0) fail("cannot set address " + address);
    close(sock);
}

// Uses netlink, because the ioctl requires privilege outside of the user namespace.
void set_transmit_queue(const char* device, uint32_t packets) {
    struct {
        nlmsghdr header;
        ifinfomsg link;
        rtattr attribute;
        uint32_t packets;
    } request{};
    request.header = {sizeof request, RTM_NEWLINK, NLM_F_REQUEST | NLM_F_ACK, 1, 0};
    request.link.ifi_index = static_cast<int>(if_nametoindex(device));
    request.attribute = {RTA_LENGTH(sizeof packets), IFLA_TXQLEN};
    request.packets = packets;
    struct {
        nlmsghdr header;
        nlmsgerr error;
        char rest[256];
    } answer{};
    const int sock = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE);
    const bool told = sock >= 0 && send(sock, &request, sizeof request, 0) == sizeof request &&
                      recv(sock, &answer, sizeof answer, 0) > 0;
    const int error = told ? -answer.error.error : errno;
    if (sock >= 0) close(sock);
    errno = error;
    if (error != 0) fail("cannot lengthen the transmit queue");
}

int open_tun() {
    const int tun = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (tun < 0)
        fail("cannot open /dev/net/tun (the machine's owner may run `modprobe tun` and `chmod 666 /dev/net/tun`)");
    ifreq request{};
    std::strncpy(request.ifr_name, "wan0", IFNAMSIZ - 1);
    request.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR;
    if (ioctl(tun, TUNSETIFF, &request) < 0) fail("cannot make a TUN device");
    const unsigned offloads = TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6 | TUN_F_TSO_ECN;
    if (ioctl(tun, TUNSETOFFLOAD, offloads) < 0) fail("cannot enable segmentation offload on a TUN device");
    return tun;
}

}  // namespace

void gain_privilege() {
    if (unshare(CLONE_NEWNET) == 0) return;
    if (errno != EPERM) fail("cannot make a network namespace");
    const uid_t uid = getuid();
    const gid_t gid = getgid();
    if (unshare(CLONE_NEWUSER) < 0)
        fail("cannot make a user namespace: run as root, or let the machine's owner allow user namespaces");
    write_file("/proc/self/setgroups", "deny", false);
    write_file("/proc/self/uid_map", "0 " + std::to_string(uid) + " 1");
    write_file("/proc/self/gid_map", "0 " + std::to_string(gid) + " 1");
    if (unshare(CLONE_NEWNET) < 0) fail("cannot make a network namespace");
}

HostDevice make_host(const std::string& name, const std::string& address, const std::string& address6, int mtu,
                     const Sysctls& sysctls) {
    HostDevice host;
    host.name = name;
    host.address = address;
    host.address6 = address6;
    if (unshare(CLONE_NEWNET) < 0) fail("cannot make a network namespace");
    host.ns = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    struct stat status {};
    if (host.ns < 0 || fstat(host.ns, &status) < 0) fail("cannot open the network namespace");
    host.inode = status.st_ino;

    write_file("/proc/sys/net/ipv6/conf/default/disable_ipv6", address6.empty() ? "1" : "0", false);
    host.tun = open_tun();
    const int sock = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (sock < 0) fail("cannot open a socket");
    set_up(sock, "lo");
    set_transmit_queue("wan0", kTransmitQueue);
    ifreq request{};
    std::strncpy(request.ifr_name, "wan0", IFNAMSIZ - 1);
    request.ifr_mtu = mtu;
    if (ioctl(sock, SIOCSIFMTU, &request) < 0) fail("cannot set the MTU");
    set_up(sock, "wan0");
    close(sock);
    if (!address.empty()) set_v4(address);
    if (!address6.empty()) set_v6(address6);
    for (const auto& [key, value] : sysctls) {
        std::string path = "/proc/sys/" + key;
        std::replace(path.begin() + 10, path.end(), '.', '/');
        write_file(path, value);
    }
    host.statistics = open("/proc/thread-self/net/dev", O_RDONLY | O_CLOEXEC);
    return host;
}

void set_host_address(HostDevice& host, const std::string& address) {
    const int home = open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC);
    if (home < 0 || setns(host.ns, CLONE_NEWNET) < 0) fail("cannot enter the host's namespace");
    std::string wrong;
    try {
        set_v4(address);
        host.address = address;
    } catch (const std::runtime_error& error) {
        wrong = error.what();
    }
    if (setns(home, CLONE_NEWNET) < 0) fail("cannot leave the host's namespace");
    close(home);
    if (!wrong.empty()) throw std::runtime_error(wrong);
}

uint64_t kernel_drops(const HostDevice& host) {
    char text[4096];
    const ssize_t n = pread(host.statistics, text, sizeof text - 1, 0);
    if (n <= 0) return 0;
    text[n] = 0;
    const char* line = std::strstr(text, "wan0:");
    unsigned long long dropped = 0;  // columns: 8 of receive, then bytes, packets, errs, drop of transmit
    if (line == nullptr ||
        std::sscanf(line, "wan0: %*u %*u %*u %*u %*u %*u %*u %*u %*u %*u %*u %llu", &dropped) != 1)
        return 0;
    return dropped;
}

int kill_inside(const std::vector<HostDevice>& hosts) {
    int killed = 0;
    for (bool found = true; found;) {  // repeated until no process is left, as a dying one may have forked
        found = false;
        DIR* proc = opendir("/proc");
        if (proc == nullptr) return killed;
        while (const dirent* entry = readdir(proc)) {
            const pid_t pid = static_cast<pid_t>(std::atol(entry->d_name));
            struct stat status {};
            if (pid <= 0 || pid == getpid()) continue;
            if (stat(("/proc/" + std::to_string(pid) + "/ns/net").c_str(), &status) < 0) continue;
            const bool inside = std::any_of(hosts.begin(), hosts.end(),
                                            [&](const HostDevice& host) { return host.inode == status.st_ino; });
            if (inside && kill(pid, SIGKILL) == 0) {
                found = true;
                ++killed;
            }
        }
        closedir(proc);
        if (found) usleep(2000);
    }
    return killed;
}

void close_doors(std::vector<HostDevice>& hosts) {
    for (HostDevice& host : hosts) {
        close(host.ns);
        host.ns = -1;
    }
}

void enter(pid_t pid, int fd, char** argv) {
    const std::string process = "/proc/" + std::to_string(pid);
    const std::string door = process + "/fd/" + std::to_string(fd);
    const int ns = open(door.c_str(), O_RDONLY | O_CLOEXEC);
    if (ns < 0) fail("the lab is not up, or belongs to another user");
    if (setns(ns, CLONE_NEWNET) < 0) {
        const int user = open((process + "/ns/user").c_str(), O_RDONLY | O_CLOEXEC);
        if (user < 0 || setns(user, CLONE_NEWUSER) < 0 || setns(ns, CLONE_NEWNET) < 0)
            fail("cannot enter the host's namespace");
        close(user);
    }
    struct stat inside {}, held {};
    if (fstat(ns, &inside) < 0 || stat(door.c_str(), &held) < 0 || held.st_ino != inside.st_ino)
        fail("the lab is going down");  // it may have looked for whom to end before this process was inside
    execvp(argv[0], argv);
    fail(std::string("cannot run ") + argv[0]);
}

}  // namespace lab
