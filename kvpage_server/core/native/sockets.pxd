cdef extern from *:
    """
    #include <sys/socket.h>
    #include <sys/uio.h>
    #ifndef MSG_NOSIGNAL
    #define MSG_NOSIGNAL 0
    #endif
    """
    struct iovec:
        void *iov_base
        size_t iov_len

    struct msghdr:
        iovec *msg_iov
        size_t msg_iovlen

    int MSG_DONTWAIT
    int MSG_NOSIGNAL
    ssize_t readv(int fd, const iovec *into, int count) nogil
    ssize_t recvmsg(int fd, msghdr *message, int flags) nogil
    ssize_t sendmsg(int fd, const msghdr *message, int flags) nogil
